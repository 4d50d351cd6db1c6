"""Measurements that anybody can repeat: `engine` times kernels and engine on this machine (`make bench`). Not shipped."""
