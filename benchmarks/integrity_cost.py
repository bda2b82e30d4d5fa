"""What checking requests and sealing answers costs this machine's CPU: the constants of scenarios/integrity.yaml.

    python -m benchmarks.integrity_cost

``request_s``: one ECDSA P-384 verification, as attestation evidence and client certificates of that curve need, by ``openssl speed``. ``prompt_token_s``: SHA-384 over
the prompt, four bytes a token. ``token_s``: an HMAC-SHA-384 over one streamed event of 200 bytes. CPU seconds, the median of nine.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable

PROMPT_TOKENS, TOKEN_BYTES, EVENT_BYTES = 1024, 4, 200
TAKES, CALLS = 9, 2000


def cpu_s(call: Callable[[], object]) -> float:
    """CPU seconds of one call, the median over takes."""
    takes = []
    for _ in range(TAKES):
        start_s = time.process_time()
        for _ in range(CALLS):
            call()
        takes.append((time.process_time() - start_s) / CALLS)
    return statistics.median(takes)


def verification_s() -> float | None:
    """CPU seconds of one signature verification; None where there is no openssl command."""
    if shutil.which("openssl") is None:
        return None
    lines = subprocess.run(["openssl", "speed", "-seconds", "3", "ecdsap384"], capture_output=True, text=True, check=True).stdout.splitlines()
    return 1.0 / float(lines[-1].split()[-1])  # verifications a second stand last


def main() -> None:
    prompt, event, key = bytes(PROMPT_TOKENS * TOKEN_BYTES), bytes(EVENT_BYTES), bytes(48)
    per_prompt_s = cpu_s(lambda: hashlib.sha384(prompt).digest())
    verify_s = verification_s()
    print("request_s      ", "no openssl command" if verify_s is None else f"{verify_s:.2e}")
    print("prompt_token_s ", f"{per_prompt_s / PROMPT_TOKENS:.2e}")
    print("token_s        ", f"{cpu_s(lambda: hmac.digest(key, event, 'sha384')):.2e}")


if __name__ == "__main__":
    main()
