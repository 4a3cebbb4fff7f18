r"""The final answer in a worked solution, and whether two answers mean the same.

Answers are looked for where GSM8K (``#### 42``) and MATH (``\boxed{42}``) put them. Whether two mean the same is
decided by ``math-verify`` where it is installed (``pip install 'iha-jax[eval]'``), else by comparing what `canonical`
makes of them, which is stricter; `equivalence` says which.
"""

import functools
import importlib.util
import re
import threading
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")
_LAST_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{…}`` or ``\fbox{…}``, braces inside it matched; None without one."""
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            escaped = text[position - 1] == "\\" and not text[: position - 1].endswith("\\")
            if text[position] in "{}" and not escaped:
                depth += 1 if text[position] == "{" else -1
                if depth == 0:
                    return text[start:position].strip()
    return None


def gsm8k_answer(text: str) -> str | None:
    """The number after ``####``, else the text's last number, without commas or dollar signs; None without one."""
    marked = re.search(r"####\s*([^\n]*)", text)
    if marked:
        found = _LAST_NUMBER.search(marked.group(1).strip())
        if found:
            return _plain(found.group())
    numbers = _LAST_NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def math_answer(text: str) -> str | None:
    r"""The last ``\boxed{…}``, else the rest of a line after "answer is" or "answer:", else the last number."""
    if (found := boxed(text)) is not None:
        return found or None
    said = re.findall(r"answer(?:\s+is)?\s*:?\s*([^\n]+)", text, flags=re.IGNORECASE)
    if said:
        return said[-1].strip().rstrip(".").strip() or None
    numbers = _LAST_NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def canonical(answer: str) -> str:
    r"""An answer in one spelling: no spaces, sizes, dollar signs or ``\text``, ``\frac`` with braces, plain numbers.

    Two answers with the same canonical form mean the same; the reverse need not hold.
    """
    text = answer.strip().strip("$").strip()
    for command in (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", r"\%", "%", "^{\\circ}", r"^\circ"):
        text = text.replace(command, "")
    text = re.sub(r"\\(?:dfrac|tfrac|cfrac)", r"\\frac", text)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}", lambda m: m.group(1), text)
    # \frac12, \frac1{2} and \sqrt2 are what TeX makes of them.
    text = re.sub(r"\\frac\s*([^\s{\\])\s*([^\s{\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([^\s{\\])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*([^\s{\\\[])", r"\\sqrt{\1}", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)  # x = 5
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", text).replace("--", "")
    return _plain(text) if _NUMBER.fullmatch(text) and text else text.lower() if text.isalpha() else text


def same_answer(first: str, second: str) -> bool:
    """Whether two answers mean the same, as far as `equivalence` can tell.

    Args:
      first: the reference.
      second: what is judged.
    """
    if canonical(first) == canonical(second):
        return True
    module = _math_verify()
    if module is None:
        return False
    try:
        return bool(module.verify(_parsed(first), _parsed(second), timeout_seconds=_patience()))
    except Exception:  # what it can't read isn't shown to be the same
        return False


def equivalence() -> Literal["math-verify", "exact match of canonical forms"]:
    """How `same_answer` decides, for reports."""
    return "exact match of canonical forms" if _math_verify() is None else "math-verify"


@functools.cache
def _math_verify() -> Any:
    if importlib.util.find_spec("math_verify") is None:
        return None
    return importlib.import_module("math_verify")


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> Any:
    return _math_verify().parse(f"${answer.strip().strip('$')}$", parsing_timeout=_patience())


def _patience() -> int | None:
    """Seconds for an expression like 9^9^9, in the main thread, where math-verify can have an alarm; else no limit."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _plain(number: str) -> str:
    """A decimal number without commas, sign of plus, or zeros that say nothing; fractions and the rest as they are."""
    text = number.replace(",", "").replace("$", "").removeprefix("+")
    if "/" in text:
        return text
    try:
        value = Decimal(text)
    except InvalidOperation:
        return text
    plain = f"{value:f}"
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return "0" if plain in ("-0", "") else plain
