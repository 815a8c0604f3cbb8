"""The Jinja dialect of chat templates, as transformers renders them: sandboxed, with a few globals and filters."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from molt_sdk.errors import TemplateError


def compile_template(source: str, place: str, now: datetime.datetime | None = None) -> Callable[..., str]:
    """A function that renders the template with keyword variables. It and this raise TemplateError naming ``place``.

    The clock stands still at ``now``: a template that writes the date writes the same one for the whole run.
    """
    try:
        template = _environment(now or datetime.datetime.now()).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{place} does not compile: line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"{place} does not compile: {error}") from error

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except Exception as error:  # a template is foreign code
            count = len(variables.get("messages", ()))
            raise TemplateError(
                f"{place} cannot render these {count} messages: {type(error).__name__}: {error}"
            ) from error

    return render


def _environment(now: datetime.datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text in some templates; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
