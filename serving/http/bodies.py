"""The bodies that clients send, checked. Keys that nobody knows are ignored; known ones that cannot be honoured are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.http.backend import Generation

# Parameters that would change the answer and are not implemented -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "tools": ([],),
    "functions": ([],), "response_format": ({"type": "text"},), "use_beam_search": (False,),
}  # fmt: skip


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Sampling(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("must be a JSON object")
        for key, neutral in UNSUPPORTED.items():
            value = body.get(key)
            if value is not None and value not in neutral:
                raise ValueError(f"asks for '{key}' = {str(value)[:40]}, which is not supported")
        return body

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stream", "ignore_eos", "priority", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return 0 if value is None else value

    @model_validator(mode="after")
    def _least(self) -> Sampling:
        if self.min_tokens and not self.ignore_eos:
            raise ValueError("asks for 'min_tokens', which is only supported together with 'ignore_eos'")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def generation(self, prompt: list[int], max_tokens: int, adapter: str) -> Generation:
        """The request for the backend."""
        return Generation(
            prompt, max_tokens, ignore_eos=self.ignore_eos, stop_token_ids=frozenset(self.stop_token_ids or ()),
            temperature=1.0 if self.temperature is None else self.temperature, top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0), seed=self.seed, priority=self.priority, tenant=self.user or "", adapter=adapter,
        )  # fmt: skip


class CompletionBody(Sampling):
    """A body for ``/v1/completions``: one prompt, as text or as token ids."""

    prompt: Any  # text, or token ids
    max_tokens: Annotated[int | None, Field(ge=1)] = 16  # as the API has it

    @field_validator("prompt")
    @classmethod
    def _only_one(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > 1:
                raise ValueError("several prompts in one request are not supported")
            value = value[0]
        if not isinstance(value, str) and not (isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)):
            raise ValueError("must be text or a list of token ids")
        return value


class TextPart(BaseModel):
    """One part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: str = "text"
    text: str

    @field_validator("type")
    @classmethod
    def _text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"parts of type '{value}' are not supported")
        return value


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """What it says."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ChatBody(Sampling):
    """A body for ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None

    @property
    def cap(self) -> int | None:
        """The newer of the two names for the limit wins."""
        return self.max_completion_tokens or self.max_tokens
