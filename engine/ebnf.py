"""EBNF with a rule `root`, as in llama.cpp and vLLM, written as the grammar of llguidance.

A rule that does not refer to itself becomes a terminal, which is one regular expression. So a
grammar without recursion is matched exactly. Pure, for any thread.
"""

import json
import re

MAX_EBNF_BYTES = 8 * 1024
MAX_RULES = 100  # all tried at one place; 300 with a common beginning took 0.24 s a token

_TOKEN = re.compile(
    r'(?P<space>(?:\s|#[^\n]*)+)|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<chars>\[(?:[^\]\\]|\\.)+\])'
    r"|(?P<define>[\w-]+)\s*::=|(?P<name>[\w-]+)"
    r"|(?P<mark>[|()*+?.]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})"
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|(.)", re.DOTALL)
_NAMED = {"n": "\n", "t": "\t", "r": "\r"}


def lark_of(text: str) -> str:
    """Raises ValueError for what is no EBNF."""
    if len(text.encode()) > MAX_EBNF_BYTES:
        raise ValueError(f"it is longer than {MAX_EBNF_BYTES} bytes")
    rules, references = _rules(text)
    if "root" not in rules:
        raise ValueError("it has no rule 'root'")
    if len(rules) > MAX_RULES:
        raise ValueError(f"it has more than {MAX_RULES} rules")
    names = _names(references)
    lines = [f"start: {names['root']}"]
    for rule, parts in rules.items():
        body = " ".join(names[part[1:]] if part[:1] == "@" else part for part in parts)
        lines.append(f"{names[rule]}: {body}")
    return "\n".join(lines)


def lark_string(text: str) -> str:
    """A literal. Lark's strings are those of JSON, except for a raw DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _rules(text: str) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """The parts of each rule, `@name` for another rule, and the rules that each refers to."""
    rules: dict[str, list[str]] = {}
    references: dict[str, set[str]] = {}
    rule, offset = "", 0
    while offset < len(text):
        found = _TOKEN.match(text, offset)
        if found is None or found.end() == offset:
            raise ValueError(f"it is no EBNF at {text[offset : offset + 20]!r}")
        offset = found.end()
        kind, token = str(found.lastgroup), found[str(found.lastgroup)]
        if kind == "space":
            continue
        if kind == "define":
            if token in rules:
                raise ValueError(f"it has two rules {token!r}")
            rule, rules[token], references[token] = token, [], set()
        elif not rule:
            raise ValueError(f"it begins with {token[:20]!r}, not with a rule (name ::= ...)")
        elif kind == "name":
            references[rule].add(token)
            rules[rule].append(f"@{token}")
        else:
            rules[rule].append(_part(kind, token))
    missing = sorted(set().union(*references.values()) - set(rules)) if rules else []
    if missing:
        raise ValueError(f"it has no rule {missing[0]!r}")
    return rules, references


def _part(kind: str, token: str) -> str:
    if kind == "string":
        return lark_string("".join(char for char, _ in _chars(token[1:-1])))
    if kind == "chars":
        inner, negated = token[1:-1], token[1:2] == "^"
        chars = _chars(inner[1:] if negated else inner)
        body = "".join("-" if char == "-" and raw else _in_class(char) for char, raw in chars)
        return f"/[{'^' if negated else ''}{body}]/"
    return re.sub(r"\s", "", token).replace(".", "/(?s:.)/")


def _chars(text: str) -> list[tuple[str, bool]]:
    """The characters, and whether each is written without a backslash."""
    made = []
    for escaped, plain in _ESCAPE.findall(text):
        if plain:
            made.append((plain, True))
        elif len(escaped) > 1:
            made.append((chr(int(escaped[1:], 16)), False))
        elif escaped.isalnum() and escaped not in _NAMED:
            raise ValueError(f"it has the unknown escape \\{escaped}")
        else:
            made.append((_NAMED.get(escaped, escaped), False))
    return made


def _in_class(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _names(references: dict[str, set[str]]) -> dict[str, str]:
    """Names for the rules. A terminal's is in capitals."""
    terminals: set[str] = set()
    while True:
        more = {rule for rule, used in references.items() if used <= terminals} - terminals
        if not more:
            break
        terminals |= more
    return {
        rule: f"{'T' if rule in terminals else 'r'}{number}"
        for number, rule in enumerate(references)
    }
