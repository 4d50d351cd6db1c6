"""URLs of a Redis Cluster: a scheme of our own, since a node's URL alone doesn't say whether it is one."""

_SCHEMES = {"redis-cluster://": "redis://", "rediss-cluster://": "rediss://"}


def cluster_node_url(url: str) -> str | None:
    """The URL of the node that a cluster's URL (redis-cluster://, rediss-cluster://) names; None for any other URL."""
    for scheme, plain in _SCHEMES.items():
        if url.startswith(scheme):
            return plain + url.removeprefix(scheme)
    return None
