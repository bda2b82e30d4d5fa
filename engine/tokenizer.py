"""Text for the engine's tokens: a local ``tokenizer.json``, or plain bytes where there is none."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import InputError
from serving.files import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256


class ByteTokenizer:
    """A token is a byte of UTF-8 (modulo the vocabulary, for tiny networks); ids beyond 255 are written as ``<id>``. For random weights."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return [byte % self.vocab for byte in text.encode("utf-8", "surrogatepass")]

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """A plain transcript."""
        return self.encode(_transcript(messages))

    def decoder(self) -> ByteDecoder:
        """A decoder for one answer."""
        return ByteDecoder()


class ByteDecoder:
    """Joins bytes to characters; what is no UTF-8 becomes a replacement character."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that the token completes."""
        if token < BYTES:
            return self._utf8.decode(bytes((token,)))
        return self._utf8.decode(b"", True) + f"<{token}>"

    def flush(self) -> str:
        """A character that was never completed."""
        return self._utf8.decode(b"", True)


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder, with its chat template where there is one."""

    def __init__(self, folder: Path, vocab: int) -> None:
        """Raises InputError when the file is damaged or the package ``tokenizers`` is missing."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError(str(folder / "tokenizer.json"), "needs the package 'tokenizers'", "pip install tokenizers") from None
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise InputError(str(folder / "tokenizer.json"), f"is no tokenizer: {error}") from None
        self.vocab = vocab
        self._settings = _settings(folder / "tokenizer_config.json")

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with what the tokenizer puts before it."""
        return self._tokenizer.encode(text).ids

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The conversation as the template words it."""
        template = self._settings.get("chat_template")
        if not isinstance(template, str):
            return self.encode(_transcript(messages))
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        special = {name: _token_text(self._settings.get(name)) for name in ("bos_token", "eos_token")}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        turns = [{"role": role, "content": text} for role, text in messages]
        text = environment.from_string(template).render(messages=turns, add_generation_prompt=True, **special)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decoder(self) -> FolderDecoder:
        """A decoder for one answer."""
        return FolderDecoder(self._tokenizer)


class FolderDecoder:
    """Decodes token by token as the whole would be decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Text that the token completes."""
        return self._stream.step(self._tokenizer, token) or ""

    def flush(self) -> str:
        """An incomplete character at the end is dropped, as decoding the whole would leave a replacement character."""
        return ""


def load_tokenizer(folder: Path | None, vocab: int) -> ByteTokenizer | FolderTokenizer:
    """The folder's tokenizer if it has one, else bytes. Raises InputError for a damaged file."""
    if folder is not None and (folder / "tokenizer.json").is_file():
        return FolderTokenizer(folder, vocab)
    return ByteTokenizer(vocab)


def end_tokens(folder: Path | None) -> frozenset[int]:
    """Tokens that end an answer, as the folder's generation_config.json or config.json says; none without a folder."""
    for name in ("generation_config.json", "config.json"):
        value = _settings(folder / name).get("eos_token_id") if folder is not None else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def _settings(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else value or ""


def _transcript(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"
