"""What leaves the services beside metrics: the variables that say so, read and checked in one place.

The services take them from the connect that starts them. Some are secrets (headers): they stay in memory, and no
message names their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
SAMPLER, SAMPLER_ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EVENT_LOG = "UNDERSTUDY_EVENT_LOG"
LOG_FORMAT, LOG_LEVEL = "UNDERSTUDY_LOG_FORMAT", "UNDERSTUDY_LOG_LEVEL"
REDACT = "UNDERSTUDY_REDACT"

RATIOS = ("traceidratio", "parentbased_traceidratio")
DEFAULT_SAMPLER = "parentbased_always_on"
SAMPLERS = ("always_on", "always_off", DEFAULT_SAMPLER, "parentbased_always_off", *RATIOS)
"""Those that decide by the trace alone, so that all of it is exported, or nothing (OpenTelemetry specification,
"Environment Variable Specification")."""

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
FOR_FRAMES = (LOG_FORMAT, LOG_LEVEL, REDACT)
"""What session actors receive as well: nothing that is secret."""

_OTHERS = (
    EXPORTER, DISABLED, SAMPLER, SAMPLER_ARGUMENT, CAPTURE, EVENT_LOG, LOG_FORMAT, LOG_LEVEL, REDACT,
    "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
)  # fmt: skip


def telemetry_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that concern telemetry, as far as they are set."""
    return {
        name: value
        for name, value in environ.items()
        if value and (name in _OTHERS or name.startswith("OTEL_EXPORTER_OTLP_"))
    }


def telemetry_problems(variables: Mapping[str, str]) -> list[str]:
    """What is wrong with them, a line for each variable; secret values are not in it."""
    found = []
    for name, value in sorted(variables.items()):
        problem = next((check(value) for pattern, check in _CHECKS if re.fullmatch(pattern, name)), "")
        if problem:
            shown = re.sub(r"(?s)^(\w+://)?.*@", r"\1***@", value)  # an endpoint with a password
            found.append(f"{name} {problem}" if "HEADERS" in name else f"{name}={shown!r} {problem}")
    if protocol_of(variables) == GRPC:
        found += [
            f"{name}='deflate' is for http/protobuf: grpc has gzip and none"
            for name, value in sorted(variables.items())
            if name.endswith("COMPRESSION") and value.strip().lower() == "deflate"
        ]
    if variables.get(SAMPLER, "").strip().lower() in RATIOS and _ratio(variables.get(SAMPLER_ARGUMENT, "1")) is None:
        found.append(f"{SAMPLER_ARGUMENT}={variables[SAMPLER_ARGUMENT]!r} must be a number from 0 to 1")
    return found


def sampler_of(variables: Mapping[str, str]) -> tuple[str, float]:
    """One of `SAMPLERS`, and the share of traces that it takes by their ids. What can't be used counts as not set."""
    name = variables.get(SAMPLER, "").strip().lower()
    ratio = _ratio(variables.get(SAMPLER_ARGUMENT, "1"))
    return name if name in SAMPLERS else DEFAULT_SAMPLER, 1.0 if ratio is None else ratio


def protocol_of(variables: Mapping[str, str]) -> str:
    """How spans are sent to a collector."""
    return next((variables[name] for name in PROTOCOLS if variables.get(name)), HTTP)


def exports_spans(variables: Mapping[str, str]) -> bool:
    """Whether spans leave the services at all; the local file counts."""
    return not _is_true(variables.get(DISABLED, "")) and variables.get(EXPORTER, "otlp") != "none"


def has_collector(variables: Mapping[str, str]) -> bool:
    """Whether spans go to a collector: one is named, or the exporter is, whose default is on this machine."""
    named = variables.get(EXPORTER, "").split(",")  # others than `otlp` are meant for another program's own spans
    return "otlp" in named or any(variables.get(name) for name in ENDPOINTS)


def captures_content(variables: Mapping[str, str]) -> bool:
    """Whether prompts, answers, arguments and results shall be in the spans."""
    return _is_true(variables.get(CAPTURE, ""))


def redaction_rules(variables: Mapping[str, str]) -> list[str]:
    """The user's own regular expressions: one per line."""
    return [line.strip() for line in variables.get(REDACT, "").splitlines() if line.strip()]


def header_values(variables: Mapping[str, str]) -> list[str]:
    """What is secret in the headers, as written and decoded."""
    parts = [part for name, value in variables.items() if name.endswith("_HEADERS") for part in value.split(",")]
    values = [part.partition("=")[2].strip() for part in parts]
    return [*values, *map(unquote, values)]


def _is_true(text: str) -> bool:
    return text.strip().lower() == "true"


def _one_of(*known: str) -> Callable[[str], str]:
    return lambda value: "" if value.strip().lower() in known else f"must be one of: {', '.join(known)}"


def _ratio(value: str) -> float | None:
    value = value.strip()
    return float(value) if re.fullmatch(r"0*(\.\d+)?|0+\.|1(\.0*)?", value) and value else None


def _seconds(value: str) -> str:
    return "" if re.fullmatch(r"\d+(\.\d+)?", value.strip()) and float(value) > 0 else "must be seconds, more than 0"


def _endpoint(value: str) -> str:
    return "" if re.fullmatch(r"https?://[^\s/@]+(/\S*)?", value) else "must be http://HOST:PORT or https://HOST:PORT"


def _headers(value: str) -> str:
    # The exporters log what they can't read, with the values.
    parts = [part.partition("=") for part in value.split(",") if part.strip()]
    fine = all(separator and re.fullmatch(r"[\w.!#$%&'*+^`|~-]+", key.strip()) for key, separator, _ in parts)
    return "" if fine and parts else "must be NAME=VALUE,NAME=VALUE (its value is not shown)"


def _rules(value: str) -> str:
    for rule in redaction_rules({REDACT: value}):
        try:
            if re.compile(rule).search(""):
                return f"has a rule that everything matches: {rule}"
        except re.error as error:
            return f"has a rule that is no regular expression ({error}): {rule}"
    return ""


def _directory(value: str) -> str:
    return "" if value.startswith("/") else "must be a directory's absolute path"


_CHECKS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (r"OTEL_EXPORTER_OTLP_(TRACES_)?PROTOCOL", _one_of(HTTP, GRPC)),
    (r"OTEL_EXPORTER_OTLP_(TRACES_)?ENDPOINT", _endpoint),
    (r"OTEL_EXPORTER_OTLP_(TRACES_)?TIMEOUT", _seconds),
    (r"OTEL_EXPORTER_OTLP_(TRACES_)?COMPRESSION", _one_of("gzip", "deflate", "none")),
    (r"OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS", _headers),
    (SAMPLER, _one_of(*SAMPLERS)),
    (DISABLED, _one_of("true", "false")),
    (CAPTURE, _one_of("true", "false")),
    (EVENT_LOG, _directory),
    (LOG_FORMAT, _one_of(*LOG_FORMATS)),
    (LOG_LEVEL, _one_of(*LOG_LEVELS)),
    (REDACT, _rules),
)
