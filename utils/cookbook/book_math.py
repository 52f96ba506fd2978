"""A Sphinx extension: formulas as MathML, which browsers draw themselves. Nothing is loaded from anywhere.

A formula that latex2mathml does not understand is a warning, and warnings are errors of the book.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert


def mathml(formula: str, *, block: bool = False) -> str:
    """A LaTeX formula as a <math> element. Raises ValueError for a command that is not known."""
    try:
        made = convert(formula, display="block" if block else "inline")
    except Exception as error:  # latex2mathml's errors share no base class
        raise ValueError(f"formula {formula!r}: {type(error).__name__}") from None
    if unknown := re.search(r"\\\w+", re.sub(r"<annotation.*?</annotation>", "", made)):
        raise ValueError(f"formula {formula!r}: {unknown.group()} is not known to latex2mathml")
    return made


def _visit(translator: Any, node: Any, block: bool) -> None:
    from docutils.nodes import SkipNode
    from sphinx.util import logging

    try:
        made = mathml(node.astext(), block=block)
    except ValueError as error:
        logging.getLogger(__name__).warning(str(error), location=node)
        made = ""
    translator.body.append(f'<div class="math">{made}</div>\n' if block else made)
    raise SkipNode


def visit_inline(translator: Any, node: Any) -> None:
    _visit(translator, node, block=False)


def visit_block(translator: Any, node: Any) -> None:
    _visit(translator, node, block=True)


def setup(app: Any) -> dict:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
