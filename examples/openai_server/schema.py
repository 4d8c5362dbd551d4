"""What may stand in the body of a request, and what becomes of it.

Types are strict.  Fields that we do not know are ignored, as clients of OpenAI's API expect, unless they ask for an
answer that we would not give: those are refused by name (`REFUSED`).  Left out, a sampling field has OpenAI's default
(temperature 1), with one exception: without `max_tokens` both routes go on for as long as the context allows.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from examples.openai_server.errors import ApiError
from examples.openai_server.text import Tokenizer
from kvloom.scheduler import SamplingParams

STOPS_MAX = 4  # OpenAI's limit

# Field -> values that ask for nothing special; null is one for every field.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return text


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _one_prompt(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        return _one_prompt(value[0])  # a list of one prompt is one prompt
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise ValueError("several prompts in one request are not supported: send one request for each")
    raise ValueError("must be a string or a list of token ids (whole numbers)")


def _only_text(value: object) -> object:
    """Content in parts, joined; parts of other kinds (images, sound) would change the answer if left out."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("must be a string or a list of text parts")
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str, AfterValidator(_encodable)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationRequest(_Body):
    """What the two routes have in common; the fields from `top_k` on are known from vLLM, `deadline` is ours."""

    prompt_field: ClassVar[str]

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1)]] | None, Field(max_length=STOPS_MAX), BeforeValidator(_as_list)
    ] = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest that names the field."""
        given: dict[str, Any] = {
            "max_new_tokens": self.output_limit,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's way to say: all
            "min_p": self.min_p,
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @abstractmethod
    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Takes as long as the prompt is: not for the event loop.  Raises ApiError."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt_field = "prompt"

    prompt: Annotated[Any, BeforeValidator(_one_prompt)]

    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        if isinstance(self.prompt, str):
            try:
                return tokenizer.encode(_encodable(self.prompt))
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", param="prompt", code="invalid_value") from error
        return list(self.prompt)


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_only_text)]
    name: Text | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions; `max_completion_tokens` is the newer name of `max_tokens` and goes before it."""

    prompt_field = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        messages = []
        for message in self.messages:
            # `developer` is OpenAI's later word for `system`; the templates of open models only know the latter.
            role = "system" if message.role == "developer" else message.role
            name = {"name": message.name} if message.name else {}
            messages.append({"role": role, "content": message.content, **name})
        try:
            return tokenizer.encode_chat(messages)
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from error


Parsed = TypeVar("Parsed", bound=GenerationRequest)


def parse(raw: bytes, kind: type[Parsed]) -> Parsed:
    """The body as `kind`.  Raises ApiError, with the field where one is to blame."""
    try:
        # JSON is UTF-8 (RFC 8259); given bytes, json would also guess at UTF-16 and UTF-32.
        body = json.loads(raw.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, harmless in REFUSED.items():
        value = body.get(name)
        # The types are compared as well, since True == 1 in Python.
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            message = f"{name}: not supported, except {_spelled(harmless)}"
            raise ApiError(400, message, param=name, code="unsupported_value")
    try:
        return kind.model_validate(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}", param=param, code="invalid_value") from invalid


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Which of two values counts is a matter of the parser: two programs would read two different requests."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"{twice!a}: given twice", param=ascii(twice)[1:-1], code="invalid_json")
    return made


def _spelled(values: tuple[object, ...]) -> str:
    return " or ".join(["null", *map(json.dumps, values)])
