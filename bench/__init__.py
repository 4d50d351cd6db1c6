"""Measurements that anybody can repeat: `engine` times kernels and engine on this machine (`make bench`), `admission` what a
gateway does between a key and the queue, `queue/` is `sluicegate bench queue`, with
`fleet` for its processes."""
