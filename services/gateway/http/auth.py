"""Every request says by its key whose it is."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.settings import names_loopback

# By these a trusted key names the person whom it speaks for, and the chat; with any other key they mean nothing.
USER_HEADER = "X-OpenWebUI-User-Id"
CHAT_HEADER = "X-OpenWebUI-Chat-Id"


async def known(request: Request) -> Principal | None:
    """Whose key a request has; None for one without a valid key."""
    gateway: Gateway = request.app.state.gateway
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return await gateway.keys.principal(key.strip() if scheme.lower() == "bearer" else "")


def unauthorized() -> ApiError:
    message = "a valid API key is needed: Authorization: Bearer KEY"
    return ApiError(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})


class _Bearer(SecurityBase):
    """Whose request it is, and how OpenAPI's document says that."""

    model = HTTPBearer(description="An API key")
    scheme_name = "HTTPBearer"

    async def __call__(self, request: Request) -> Principal:
        gateway: Gateway = request.app.state.gateway
        if gateway.settings.auth == "off":
            _from_this_machine(request)
        found = await known(request)
        if found is None:
            raise unauthorized()
        name = request.headers.get(USER_HEADER, "") if found.trusted else ""
        return found.named(name) if name else found


authenticated = _Bearer()


async def administrator(principal: Annotated[Principal, Depends(authenticated)]) -> Principal:
    if principal.role != "admin":
        raise ApiError(403, "forbidden", "this needs an administrator's API key")
    return principal


def _from_this_machine(request: Request) -> None:
    """Without keys, a web page in the user's browser must not be able to speak for the user."""
    addresses = [f"//{request.headers.get('host', '')}"]
    if "origin" in request.headers:
        addresses.append(request.headers["origin"])
    if not all(map(names_loopback, addresses)):
        raise ApiError(403, "forbidden", "with auth off, only requests from and to this machine are answered")


UserDep = Annotated[Principal, Depends(authenticated)]
AdminDep = Annotated[Principal, Depends(administrator)]
