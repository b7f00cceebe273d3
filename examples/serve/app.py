"""Embeds texts with a SentenceTransformer: one that `subquad plan --save served` wrote, or any other.

SERVE_MODEL=served uvicorn app:app --host 0.0.0.0 --port 8000

POST /embed    {"texts": ["…"]} → {"embeddings": [[…]], "tokens": [n]}; 413 for a text that is too long, 422 for a body
               of another form
GET  /health   200 while texts are embedded with the kernels that are required, else 503; says if there is an alarm
GET  /metrics  for Prometheus: latencies, tokens, and what the audit finds
"""

import asyncio
import copy
import logging
import os
import queue
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import numpy as np
from batching import Batcher
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from pydantic import AfterValidator, BaseModel, Field
from sentence_transformers import SentenceTransformer

import subquad as sq
import subquad.hf  # attaches the methods when the model is loaded
from subquad.audits import metrics

MODEL = os.environ.get("SERVE_MODEL", "served")
REQUIRE = os.environ.get("SERVE_REQUIRE", "cpu")  # the backend without which the service does not start
EXACT = os.environ.get("SERVE_EXACT") == "1"  # exact attention instead of the plan: what to set after an alarm
BATCH_TOKENS = int(os.environ.get("SERVE_BATCH_TOKENS", "512"))  # in a batch, padding included
WAIT = float(os.environ.get("SERVE_WAIT_MS", "5")) / 1000
QUEUE = int(os.environ.get("SERVE_QUEUE", "1000"))  # texts that may wait; more are refused with 503
CHARACTERS = 20  # per token; longer texts are refused without counting their tokens

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def encodable(text: str) -> str:
    """The text itself; ValueError for one that UTF-8 cannot hold, which the tokenizer could not read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair; send Unicode text") from None
    return text


class Texts(BaseModel):
    """The body of a request."""

    texts: Annotated[list[Annotated[str, AfterValidator(encodable)]], Field(min_length=1, max_length=256)]


class Service:
    """The model with its audit, and the thread that runs it."""

    def __init__(self) -> None:
        state = sq.backends().get(REQUIRE, "no such backend")
        if state != "available":
            raise RuntimeError(f"SERVE_REQUIRE={REQUIRE}, but: {state}")
        self.model = SentenceTransformer(MODEL, device="cpu", local_files_only=True).eval()
        self.tokenizer = copy.deepcopy(self.model.tokenizer)  # two threads must not share one
        self.most_tokens = int(self.model.max_seq_length or self.tokenizer.model_max_length)
        self.provenance = sq.hf.provenance(self.model)
        if EXACT:
            sq.hf.restore(self.model)
        runs = sq.hf.describe(self.model).methods
        self.methods = {number: str(method) for number, method in runs.items()} or "exact attention"
        self.warm_up()
        self.registry = CollectorRegistry()
        self.audit = None
        if runs and self.provenance.keys() & {"floor", "audit"}:
            self.audit = sq.audit(self.model, callback=metrics.prometheus(self.registry))
            metrics.prometheus_output(self.audit, self.registry)
            self.audit.start()
        else:
            logging.info("not audited: %s", f"no floor is recorded in {MODEL}" if runs else "exact attention runs")
        self.requests = Counter("serve_requests", "Requests.", ["status"], registry=self.registry)
        self.seconds = Histogram("serve_seconds", "Seconds per request.", registry=self.registry)
        sizes = [2**power for power in range(3, 16)]
        self.tokens = Histogram("serve_tokens", "Tokens per text.", registry=self.registry, buckets=sizes)
        self.batch = Histogram("serve_batch_texts", "Texts per batch.", registry=self.registry, buckets=sizes[:6])
        self.batcher = Batcher(self.embed, BATCH_TOKENS, WAIT, QUEUE)

    def embed(self, texts: list[str]) -> np.ndarray:
        """The embeddings of a batch."""
        self.batch.observe(len(texts))
        return np.asarray(self.model.encode(texts, batch_size=len(texts), show_progress_bar=False))

    def warm_up(self) -> None:
        """Embed texts of all lengths, in powers of 2, so that no request pays for a first call."""
        length = 8
        while length < 2 * self.most_tokens:
            self.model.encode("a " * (min(length, self.most_tokens) - 2), show_progress_bar=False)
            length *= 2

    def counted(self, texts: Iterable[str]) -> list[int]:
        """The tokens of each text; HTTPException 413 for one that is too long."""
        counts = []
        for number, text in enumerate(texts):
            if len(text) > CHARACTERS * self.most_tokens:
                raise too_long(number, f"{len(text):,} characters", f"{CHARACTERS * self.most_tokens:,} characters")
            counts.append(len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"]))
            if counts[-1] > self.most_tokens:
                raise too_long(number, f"{counts[-1]:,} tokens", f"{self.most_tokens:,} tokens")
        return counts

    def alarm(self) -> bool:
        """Tell whether the output does not keep its floor, or a layer has drifted from a baseline."""
        return self.audit is not None and bool(self.audit.report().alarm)

    def stop(self) -> None:
        """Embed what is queued, and end the audit."""
        self.batcher.stop()
        if self.audit is not None:
            logging.info("audit at the end:\n%s", self.audit.report())
            self.audit.stop()


def too_long(number: int, size: str, most: str) -> HTTPException:
    """The error of a text that the model cannot read whole."""
    return HTTPException(413, f"text {number} has {size}, and this model reads at most {most}; send it in chunks")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model before the first request, and stop it after the last."""
    app.state.service = await asyncio.to_thread(Service)
    yield
    await asyncio.to_thread(app.state.service.stop)


app = FastAPI(title="Embeddings", lifespan=lifespan)


@app.exception_handler(RequestValidationError)
async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """422 with what is wrong and where, without the input itself, which JSON in UTF-8 may be unable to hold."""
    details = [{"loc": list(each["loc"]), "msg": each["msg"], "type": each["type"]} for each in error.errors()]
    return JSONResponse({"detail": details}, 422)


@app.post("/embed")
async def embed(body: Texts, request: Request) -> dict[str, Any]:
    """Embed some texts."""
    service: Service = request.app.state.service
    begun, status = time.perf_counter(), 500
    try:
        counts = service.counted(body.texts)
        pairs = zip(body.texts, counts, strict=True)
        try:
            futures = [asyncio.wrap_future(service.batcher.submit(*pair)) for pair in pairs]
        except queue.Full:
            raise HTTPException(503, f"more than {QUEUE} texts are waiting; try later", {"Retry-After": "1"}) from None
        embeddings = await asyncio.gather(*futures)
        status = 200
    except HTTPException as error:
        status = error.status_code
        raise
    finally:
        service.requests.labels(status).inc()
        service.seconds.observe(time.perf_counter() - begun)
    for count in counts:
        service.tokens.observe(count)
    return {"embeddings": [each.tolist() for each in embeddings], "tokens": counts}


@app.get("/health")
async def health(request: Request, response: Response) -> dict[str, Any]:
    """Report what runs, and whether it is as it should be."""
    service: Service = request.app.state.service
    backend = sq.backends()[REQUIRE]
    healthy = backend == "available" and service.batcher.alive()
    response.status_code = 200 if healthy else 503
    return {
        "status": "ok" if healthy else "failing",
        "alarm": service.alarm(),
        REQUIRE: backend,
        "max_tokens": service.most_tokens,
        "methods": service.methods,
        "planned_with": service.provenance.get("versions"),
        "floor": service.provenance.get("floor"),
    }


@app.get("/metrics")
async def exported(request: Request) -> Response:
    """The metrics, as text."""
    return Response(generate_latest(request.app.state.service.registry), media_type=CONTENT_TYPE_LATEST)
