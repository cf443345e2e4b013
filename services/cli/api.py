"""The HTTP API as the command line uses it: requests with the key, and errors as sentences."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from services.cli.settings import ClientSettings
from services.cli.words import typed
from shared.errors import Local2Error

# Where what is there is listed, by the beginning of a path.
_LISTED = {
    "/sessions/": ("sessions", "list"),
    "/files/": ("files", "list"),
    "/keys/": ("keys", "list"),
    "/dead-letters/": ("dead-letters", "list"),
    "/memory/engrams": ("memory", "list"),
    "/memory/topics/": ("memory", "topics", "list"),
    "/knowledge/facts/": ("knowledge", "show"),
    "/experiments/": ("experiment", "show"),
}
# A query may take as long as its deadline; the gateway answers 504 then.
QUERY_TIMEOUT = 1_000.0


class ApiError(Local2Error):
    """The API refused or failed; `str` is a sentence for the user, `code` is the API's own (or `unreachable`)."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Api:
    """A client of one gateway. `http` is open to callers that stream."""

    def __init__(self, settings: ClientSettings, timeout: float = 30.0) -> None:
        self.base_url = settings.base_url
        self._key_path = settings.admin_key_path.absolute()
        self._settings = settings
        self._key = settings.key()
        self.http = httpx.AsyncClient(
            base_url=self.base_url,
            auth=self._signed,
            timeout=httpx.Timeout(timeout, connect=5.0),
            # The key goes to the gateway and to nobody else.
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    def _signed(self, request: httpx.Request) -> httpx.Request:
        # a stack that starts for the first time makes its key while it is waited for
        self._key = self._key or self._settings.key()
        if self._key:
            request.headers["authorization"] = f"Bearer {self._key}"
        return request

    async def get(self, path: str, **params: Any) -> Any:
        return await self.call("GET", path, params={k: v for k, v in params.items() if v is not None})

    async def text(self, path: str, **params: Any) -> str:
        """The text of a successful answer, whatever its form. Raises ApiError."""
        return (await self._answer("GET", path, params=params)).text

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        extra = {} if timeout is None else {"timeout": httpx.Timeout(timeout, connect=5.0)}
        return await self.call("POST", path, json=body, **extra)

    async def delete(self, path: str) -> Any:
        return await self.call("DELETE", path)

    async def call(self, method: str, path: str, **request: Any) -> Any:
        """The JSON of a successful answer, None for an empty one. Raises ApiError."""
        response = await self._answer(method, path, **request)
        return response.json() if response.content else None

    async def _answer(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = await self.http.request(method, path, **request)
        except httpx.HTTPError as exc:
            raise unreachable(self.base_url, exc) from exc
        if response.is_success:
            return response
        raise self.refusal(response)

    def refusal(self, response: httpx.Response) -> ApiError:
        """The error of an answer that has been read; its shape is {"error": {"code", "message"}}."""
        status = response.status_code
        try:
            error = response.json()["error"]
            code, message = str(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            return ApiError(f"http_{status}", f"{response.url} answered {status} without saying why", status)
        if status == 401:
            message = (
                f"{self.base_url} does not know your key: set LOCAL2_API_KEY to one that it does ({message}; "
                f"the key is taken from LOCAL2_API_KEY, LOCAL2_ADMIN_KEY or {self._key_path})"
            )
        if status == 404 and code == "not_found":
            message += "".join(
                f"; what there is: {typed(*words)}"
                for start, words in _LISTED.items()
                if response.request.url.path.startswith(start)
            )
        if status == 503:
            message += f"; what to do: {typed('doctor')}"
        if status == 429 and (wait := response.headers.get("retry-after")):
            message += f" (try again in {wait} s)"
        return ApiError(code, message, status)


def unreachable(base_url: str, exc: Exception) -> ApiError:
    if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
        return ApiError("unreachable", f"nothing answers at {base_url}; start the stack with: {typed('run')}")
    return ApiError("unreachable", f"the connection to {base_url} failed: {str(exc) or type(exc).__name__}")


def rows(answer: Any, name: str) -> list[dict[str, Any]]:
    """The list in an answer of the API, bare or under its name. Raises ApiError when there is none."""
    found = answer.get(name) if isinstance(answer, dict) else answer
    if not isinstance(found, list):
        raise ApiError("unexpected_answer", f"the gateway's answer has no list of {name}")
    return found
