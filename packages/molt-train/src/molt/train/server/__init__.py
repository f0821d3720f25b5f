"""The HTTP server: the control API of `molt.agents.protocol`, with the gateway beside it on one port."""

from molt.train.server.app import Desk, create_app
from molt.train.server.errors import ApiError, no_room
from molt.train.server.listen import HttpServer, bind, origin

__all__ = ["ApiError", "Desk", "HttpServer", "bind", "create_app", "no_room", "origin"]
