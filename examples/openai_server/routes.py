"""What answers at which path."""

import re
import time
import uuid

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from examples.openai_server.answer import Answer, Kind, Service
from examples.openai_server.errors import ApiError
from examples.openai_server.schema import ChatRequest, CompletionRequest
from examples.openai_server.shapes import ChatShape, CompletionShape
from kvloom.metrics import KVLoomCollector
from kvloom.scheduler import EngineState

CHAT = Kind(ChatRequest, ChatShape)
COMPLETION = Kind(CompletionRequest, CompletionShape)

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# What is read, and thrown away, of a body that is too large.  To answer in the middle of it would make the client's
# writes fail, and most clients then never look at the answer.
DISCARDED_TIMES = 16


class Routes:
    """The handlers."""

    def __init__(self, service: Service, collector: KVLoomCollector | None, body_bytes_max: int) -> None:
        self._service = service
        self._collector = collector
        self._body_bytes_max = body_bytes_max
        self._created = int(time.time())

    def table(self) -> list[Route]:
        """Path by path; `/metrics` only with a collector."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
        ]
        if self._collector is not None:
            routes.append(Route("/metrics", self.metrics))
        return routes

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, CHAT)

    async def completion(self, request: Request) -> ASGIApp:
        return await self._generate(request, COMPLETION)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.model_name:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """For a liveness probe: 503 means that only a restart helps."""
        engine = self._service.engine
        state = "stalled" if engine.stalled else engine.state.value
        return JSONResponse({"status": state}, 503 if state in ("stalled", EngineState.FAILED) else 200)

    async def ready(self, request: Request) -> Response:
        """For a balancer: 503 means that no new requests should come here."""
        engine = self._service.engine
        ready = engine.state is EngineState.RUNNING and not engine.stalled
        return JSONResponse({"status": engine.state.value, "ready": ready}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        assert self._collector is not None
        return Response(self._collector.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _generate(self, request: Request, kind: Kind) -> ASGIApp:
        given = request.headers.get("x-request-id", "")
        request_id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            raw = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        return Answer(self._service, kind, raw, request_id)

    async def _body(self, request: Request) -> bytes:
        """Raises ApiError for one that is too large, whatever its headers say."""
        chunks, size, limit = [], 0, self._body_bytes_max
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > limit * DISCARDED_TIMES:
                break
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        return b"".join(chunks)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvloom",
            "max_model_len": self._service.engine.max_seq,
        }
