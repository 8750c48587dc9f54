"""Classes of calls that differ in sizes, in the file of a captured step: what predicts programs for further sizes.

    code = write_class(writer, group, "class_1")      the program of its last recording is written apart
    group = read_class(reader, code, key, cached)     key, cached: that program

Written are the recorded program and the one after the passes, each with a function of the sizes for every integer, the
op stream with the same, and what was learned of sizes that were compared. Code is made again at the first new size.
Invariant: what a file holds as functions of sizes are numbers and one of three operators, and nothing in it is called
but ops and functions of numbers: of these functions Python source is made.
Refusals: `SaveError` for a function that Python called with a size and that has no name in files; `LoadError` for
programs that have another number of integers than functions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from functionalize.errors import LoadError
from functionalize.lengths.coverage import Coverage, KnownPath
from functionalize.lengths.length_class import LengthClass
from functionalize.lengths.recorded_calls import RecordedCall
from functionalize.lengths.signature_template import SignatureTemplate
from functionalize.lengths.size_facts import ComputedSize, SizeFacts
from functionalize.program.field_types import checked, fields_checked
from functionalize.program.json_codec import Form, Json, plain_form
from functionalize.program.program import Program
from functionalize.program.program_file import Reader, Writer, check_function
from functionalize.templates.fitting import Formula
from functionalize.templates.leaves import leaves_of
from functionalize.templates.symbols import Symbols
from functionalize.templates.template import Template

_COUNTS = ("recorded", "failures", "apart", "replays")


def _formula(*values: Any) -> Formula:
    made = Formula(*values)
    numbers = [made.constant, made.divisor, made.scale, made.summand]
    numbers += [n for c, factors in made.terms for n in (c, *factors)]
    if any(type(n) is not int for n in numbers) or made.operator not in ("", "//", "%"):
        raise LoadError(f"holds {values}, which is no function of sizes: damaged")
    return made


def _computed(function: Any, args: Any) -> ComputedSize:
    check_function(function, args)
    return ComputedSize(*checked(ComputedSize, (function, args)))


FORMS: tuple[Form, ...] = (
    *map(plain_form, (KnownPath, Coverage, SignatureTemplate, SizeFacts, Symbols)),
    Form(Formula, plain_form(Formula).save, _formula),
    Form(ComputedSize, plain_form(ComputedSize).save, _computed),
)


def write_class(writer: Writer, group: LengthClass, label: str) -> Json:
    """A class with a template; raises `SaveError`."""
    value, latest = writer.encoder.value, group.references[-1]
    assert group.template is not None
    passed = group.passed[0].template if group.passed else None
    return {
        "template": _write_template(writer, group.template, label),
        "passed": passed and _write_template(writer, passed, f"{label} after passes"),
        "signatures": value(group.signatures, "the op streams"),
        "coverage": value(group.coverage, "what decides by sizes"),
        "shapes": [value(list(each)) for each in (group.known, group.differing)],
        "names": value(list(latest.names)),
        "counts": [value(getattr(group, name)) for name in _COUNTS],
        "records": writer.encoder.records,
    }


def _write_template(writer: Writer, template: Template, label: str) -> Json:
    # Guards on the state are those of the last recording: the first ones may look at objects that are gone.
    program = replace(template.reference, facts=())
    value = writer.encoder.value
    return {
        "program": writer.program(program, label),
        "symbols": value(template.symbols),
        "formulas": value(template.formulas),
    }


def read_class(reader: Reader[Program], code: Json, key: Hashable, cached: Any) -> LengthClass:
    """The class that was written as `code`. key, cached: the program of its last recording."""
    value = reader.decoder.value
    template, signatures = _read_template(reader, code["template"]), value(code["signatures"])
    coverage = value(code["coverage"])
    counts = dict(zip(_COUNTS, map(value, code["counts"]), strict=True))
    if not isinstance(signatures, SignatureTemplate) or not isinstance(coverage, Coverage):
        raise LoadError("holds sizes of calls without what decides by them: damaged")
    program = replace(template.reference, facts=cached.program.facts)
    reference = RecordedCall(key, value(code["names"]), program, signatures.reference, cached)
    known, differing = map(value, code["shapes"])
    fields_checked(LengthClass, {"known": known, "differing": differing})
    group = LengthClass(
        reference.tokens,
        [reference],
        known=known,
        differing=differing,
        **fields_checked(LengthClass, counts),
    )
    reference.forget()
    group.takes([template], signatures, coverage)
    if code["passed"] is not None:
        group.takes_passed([_read_template(reader, code["passed"])])
    return group


def _read_template(reader: Reader[Program], code: Json) -> Template:
    value = reader.decoder.value
    program, formulas = reader.program(code["program"]), value(code["formulas"])
    if len(leaves_of(program).integers) != len(formulas):
        raise LoadError("holds a program with other integers than functions of sizes: damaged")
    return Template(program, value(code["symbols"]), formulas)
