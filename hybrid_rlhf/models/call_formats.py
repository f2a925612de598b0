r"""Formats of tool calls: for each a response template of transformers (utils/chat_parsing), and a pattern that
recognises the format in a call rendered by a chat template.

The keys of a response template: https://huggingface.co/docs/transformers/chat_response_parsing. A pattern that ends in
\Z lets the end of the turn end the call: its stop token is cut before.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any, NamedTuple

_FUNCTION = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WITH_ID = {**_NAMED, "id": "{id}"}
_THOUGHT: dict[str, Any] = {"open_pattern": r"\A\s*(?:<think>|\[THINK\])",
                            "close_pattern": r"(?:</think>|\[/THINK\])\s*"}
_EXACT: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
_JSON_CALL = '{"name": ..., "arguments": {...}}'


class CallFormat(NamedTuple):
    """shown: a pattern that matches rendered calls of this format and of no earlier one. template: the response
    template. marker: a text in every turn with a call. form: the format as shown to a model. key: the key of the
    arguments in a JSON object. rest: markup to remove from the text outside of all fields, where the template keeps
    that. python: a call's text is Python."""

    shown: re.Pattern
    template: dict
    marker: str
    form: str
    key: str = "arguments"
    rest: re.Pattern | None = None
    python: bool = False


def _template(calls: dict, thought: dict | None = None, **others: dict) -> dict:
    """A response template with these calls; text outside of all fields is the content, unless `others` has fields."""
    fields = {"reasoning_content": {**(thought or _THOUGHT), "content": "text", "repeats": True, "join": "\n"},
              "tool_calls": {"content": "json", "repeats": True, **calls}, **(others or {"content": _EXACT})}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _values(pattern: str) -> dict:
    """Arguments written as tags: `pattern` matches key and value; their types come from the schemas of the tools."""
    return {"tag_pattern": pattern, "value_parser": {"name": "text", "args": {"strip": False}}}


def _format(shown: str, template: dict, marker: str, form: str, **more: Any) -> CallFormat:
    return CallFormat(re.compile(shown, re.DOTALL), template, marker, form, **more)


_QWEN_TAG = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
_GLM_TAG = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))"
_ATEM_TAG = r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>(?=\s*(?:<atem:parameter|\Z))'
_MISTRAL = r"\[TOOL_CALLS\]\s*(?P<name>[^\[\s{]+)\s*(?:\[CALL_ID\])?(?P<id>[^\[\s{]*)\s*\[ARGS\]"
_DEEPSEEK = (r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
             r"|(?P<name>[^\n<]+)<｜tool▁sep｜>)")
_GPT_OSS = (r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>commentary\s+)?to=functions\.(?P<name>[^\s<]+)"
            r"\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>")
_LLAMA = (r'(?:<\|python_tag\|>\s*|;\s*)?(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,'
          r'\s*"parameters"\s*:)|<\|python_tag\|>\s*')

FORMATS = {
    "qwen_xml": _format(  # Qwen3.5, Qwen3-Coder, Nemotron 3
        r"<tool_call>\s*<function=", _template(
            {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
             "close_pattern": r"\s*(?:</function>\s*)?</tool_call>\s*", "content": "xml-inline",
             "content_args": _values(_QWEN_TAG), "transform": _NAMED}),
        "<tool_call>", "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"),
    "glm": _format(
        r"<tool_call>[^\s{<]+\s*<arg_key>", _template(
            {"open_pattern": r"<tool_call>(?P<name>[^\s<{]+)\s*", "close_pattern": r"\s*</tool_call>\s*",
             "content": "xml-inline", "content_args": _values(_GLM_TAG), "transform": _NAMED}),
        "<tool_call>", "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"),
    "hermes": _format(
        r"<tool_call>\s*\{.*\}\s*</tool_call>", _template(
            {"open_pattern": r"<tool_call>\s*", "close_pattern": r"\s*</tool_call>\s*", "transform": _FUNCTION}),
        "<tool_call>", f"<tool_call>{_JSON_CALL}</tool_call>"),
    "mistral_named": _format(
        r"\[TOOL_CALLS\].*\[ARGS\]", _template(
            {"open_pattern": _MISTRAL, "close_pattern": r"\s*(?:(?=\[TOOL_CALLS\])|\Z)", "transform": _WITH_ID}),
        "[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]{...}"),
    "mistral_list": _format(
        r"\[TOOL_CALLS\]\s*\[", _template(
            {"open_pattern": r"\[TOOL_CALLS\]\s*", "close_pattern": r"\s*\Z", "transform": _FUNCTION}),
        "[TOOL_CALLS]", f"[TOOL_CALLS][{_JSON_CALL}]"),
    "json_list": _format(  # Phi-4-mini, Granite 3
        r"<\|tool_call\|>\s*\[", _template(
            {"open_pattern": r"<\|tool_call\|>\s*", "close_pattern": r"\s*(?:<\|/tool_call\|>\s*|\Z)",
             "transform": _FUNCTION}),
        "<|tool_call|>", f"<|tool_call|>[{_JSON_CALL}]<|/tool_call|>"),
    "gpt_oss": _format(
        r"to=functions\.", _template(
            {"open_pattern": _GPT_OSS, "close_pattern": r"\s*(?:<\|call\|>\s*|\Z)", "transform": _NAMED},
            {"open_pattern": r"<\|channel\|>analysis<\|message\|>", "close_pattern": r"<\|end\|>\s*"},
            content={"open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
                     "close_pattern": r"<\|end\|>|\Z", **_EXACT}, rest=_EXACT),
        "to=functions.", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}",
        rest=re.compile(r"<\|start\|>assistant")),
    "deepseek": _format(
        r"<｜tool▁call▁begin｜>", _template(
            {"open_pattern": _DEEPSEEK, "transform": _NAMED,
             "close_pattern": r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>\s*)?"}),
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>NAME ... {...}<｜tool▁call▁end｜>"),
    "lfm": _format(
        r"<\|tool_call_start\|>\s*\[", _template(
            {"open_pattern": r"<\|tool_call_start\|>", "close_pattern": r"<\|tool_call_end\|>\s*", "content": "text",
             "transform": _FUNCTION}),
        "<|tool_call_start|>", "<|tool_call_start|>[NAME(KEY='VALUE')]<|tool_call_end|>", python=True),
    "gemma": _format(
        r"<\|tool_call>call:", _template(
            {"open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)\s*", "close_pattern": r"\s*<tool_call\|>\s*",
             "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True}, "transform": _NAMED},
            {"open_pattern": r"<\|channel>thought\s*", "close_pattern": r"<channel\|>\s*"}),
        "<|tool_call>", '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>'),
    "atem": _format(  # Muse
        r"<atem:invoke name=", _template(
            {"open_pattern": r'<atem:invoke name="(?P<name>[^"]+)">\s*', "close_pattern": r"\s*</atem:invoke>\s*",
             "content": "xml-inline", "content_args": _values(_ATEM_TAG), "transform": _NAMED},
            {"open_pattern": r"to=self<\|message\|>", "close_pattern": r"<\|eom\|>"},
            content={"open_pattern": r"to=user<\|message\|>", "close_pattern": r"<\|eom\|>|\Z", **_EXACT},
            rest=_EXACT),
        "<atem:invoke", '<atem:function_calls><atem:invoke name="NAME"><atem:parameter name="KEY">VALUE'
                        "</atem:parameter></atem:invoke></atem:function_calls>",
        rest=re.compile(r"<\|start\|>assistant|<\|eom\|>|to=[^\s<]+<\|message\|>|</?atem:function_calls>")),
    "llama": _format(
        r'\{\s*"name"\s*:.*"parameters"\s*:', _template(
            {"open_pattern": _LLAMA, "close_pattern": r"\s*(?:;\s*(?=\{)|<\|eo[mt]_id\|>\s*|\Z)",
             "transform": _FUNCTION}),
        "<|python_tag|>", '{"name": ..., "parameters": {...}}', key="parameters"),
}


def format_of(shown: str) -> CallFormat | None:
    """The format of a call rendered by a chat template; None for an unknown one."""
    return next((form for form in FORMATS.values() if form.shown.search(shown)), None)


# -- Parse tool calls written as Python (LFM2: `[f(a='x', b=[1, None])]`) as data, without running them ----------------


_WORDS = {"true": True, "false": False, "null": None}  # JSON's, inside of nested values


def read_python(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a list of calls (or of a single one): names and arguments, which are literals.

    Raises SyntaxError, whose `msg` is one line, for anything else.
    """
    try:
        with warnings.catch_warnings():  # of escapes such as \d
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError("it is not a list of calls that could be read") from error
    return [_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise SyntaxError("it is not a call of a function")
    names = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    if node.args or len(names) < len(node.keywords):
        raise SyntaxError("each argument needs its name (key=value)")
    return ast.unparse(node.func), {name: _value(k.value) for name, k in zip(names, node.keywords, strict=True)}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(key.value): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(inner, ast.Constant) and is_negative and type(inner.value) in (int, float):
        return -inner.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise SyntaxError(f"{ast.unparse(node)[:100]} is not a plain value")
