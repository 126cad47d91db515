"""The endpoints that generate nothing: the model, tokens, and how the server is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from foreword.errors import ForewordError, InputError
from foreword.methods import all_methods
from foreword.serve.errors import Refusal, refused
from foreword.serve.fields import DetokenizeFields, MethodFields, TokenizeFields
from foreword.serve.generation import json_response, read
from foreword.serve.service import VERSION, Service
from foreword.serve.tools import tools_of
from foreword.text import ChatOptions


@dataclass(frozen=True)
class PlainEndpoints:
    """One method for each of them."""

    service: Service

    async def models(self, request: Request) -> Response:
        cards = [{"id": name, **self.service.card()} for name in self.service.names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.service.check_model(name)
        return json_response({"id": name, **self.service.card()})

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of chat messages as the model reads them."""
        fields = await read(request, TokenizeFields, self.service)
        self.service.check_model(fields.model)
        try:
            tokens = await asyncio.to_thread(self._encoded, fields)
        except InputError as error:
            raise refused(error) from error
        context = self.service.llm.limits.context
        pieces = self.service.llm.tokenizer.pieces if fields.return_token_strs else None
        strings = None if pieces is None else [pieces[token] for token in tokens]
        return json_response({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings})

    def _encoded(self, fields: TokenizeFields) -> list[int]:
        if (fields.prompt is None) == (fields.messages is None):
            raise Refusal(400, "give either prompt or messages", param="prompt")
        tokenizer = self.service.llm.tokenizer
        prompt: Any = fields.messages if fields.prompt is None else fields.prompt
        if len(str(prompt)) > self.service.llm.limits.context * tokenizer.longest_piece:
            raise Refusal(400, self.service.llm.limits.too_long(f"{len(str(prompt))} characters"), param="prompt")
        if fields.prompt is not None:
            if fields.add_special_tokens is False:
                return list(tokenizer.piece_ids(fields.prompt))
            return tokenizer.encode(fields.prompt, chat=False)
        options = ChatOptions(
            tools=[tool.shown() for tool in tools_of(fields.tools)] if fields.tools else None,
            chat_template_kwargs=fields.chat_template_kwargs,
            add_generation_prompt=fields.add_generation_prompt is not False,
        )
        return tokenizer.ids(tokenizer.rendered(prompt, options=options))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        fields = await read(request, DetokenizeFields, self.service)
        self.service.check_model(fields.model)
        vocabulary = self.service.llm.limits.vocabulary
        if outside := [token for token in fields.tokens if token >= vocabulary]:
            raise Refusal(400, f"token id {outside[0]} is outside the vocabulary of {vocabulary}", param="tokens")
        text = await asyncio.to_thread(self.service.llm.tokenizer.decode, fields.tokens, False)
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Answer 200 while the engine lives; 503 if it is dead, or is being started again."""
        state = self.service.admission.state
        return json_response({"status": state}, 503 if state in ("dead", "starting") else 200)

    async def ready(self, request: Request) -> Response:
        """Answer 200 while requests are let in."""
        state = self.service.admission.state
        return json_response({"status": state}, 200 if state == "ready" else 503)

    async def methods(self, request: Request) -> Response:
        """Return the method, and those that there are."""
        switchable = self.service.options.switch_methods
        return json_response({"method": self.service.llm.method, "methods": [*all_methods()], "switchable": switchable})

    async def use_method(self, request: Request) -> Response:
        """Switch to another method while nothing runs."""
        fields = await read(request, MethodFields, self.service)
        if not self.service.options.switch_methods:
            raise Refusal(403, "the method was fixed when the server was started; start it with --switch-methods")
        async with self.service.admission.alone():
            try:
                await self.service.llm.use(fields.method)
            except ForewordError as error:
                raise Refusal(400, str(error), param="method") from error
        return await self.methods(request)

    async def version(self, request: Request) -> Response:
        """Return the version, and what `system_fingerprint` is made of."""
        service = self.service
        return json_response({"version": VERSION, "system_fingerprint": service.fingerprint, "made_of": service.made_of})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
