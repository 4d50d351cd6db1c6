"""Measurements that anybody can repeat: `engine` times kernels and engine on this machine (`make bench`), `queue/` is `sluicegate bench queue`, with
`fleet` for its processes."""
