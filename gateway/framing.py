"""Framing that proxies and servers have been known to read in two ways is refused: what one takes for a body the other may take for a request."""

from aiohttp import HttpVersion10, HttpVersion11, web

from gateway.errors import bad_request


def check_framing(request: web.Request) -> None:
    """Raises ApiError 400. The parser has refused a length beside chunks, two lengths and odd spellings before."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise bad_request("Only versions 1.0 and 1.1 of HTTP are spoken here.", code="malformed_request")
    codings = request.headers.getall("Transfer-Encoding", [])
    if codings and (request.version != HttpVersion11 or [coding.lower() for coding in codings] != ["chunked"]):
        raise bad_request("The only transfer encoding is 'chunked', in version 1.1 of HTTP.", code="malformed_request")
