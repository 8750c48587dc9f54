"""Messages of `logging` in a step: replays make the records that eager makes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from torch import Tensor

from .twins import compared, refused, replayed

logger = logging.getLogger("tests.calls")
ROOT = logging.getLogger()


def levels(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    logger.debug(f"never {n}")
    logger.info("loss %.3f of %s", n, "a")
    logger.warning(f"loss {n:.4f}", extra={"loss": n})
    logger.error("%(loss)s", {"loss": n})
    logger.log(logging.INFO, f"{n:.2f} {loss}")
    logger.critical(loss)


def deep(value: float) -> None:
    logger.info(f"deep {value:.3f}", stacklevel=2)


def with_stack_level(loss: Tensor, twin: Any) -> None:
    deep(loss.item())


@pytest.mark.parametrize("after", [levels, with_stack_level])
def test_replays_log_what_eager_logs(after: Any) -> None:
    captured = replayed(after)
    assert captured.stats.captures == 1


def test_the_level_is_that_of_the_call() -> None:
    def between(i: int) -> None:
        logger.setLevel("ERROR" if i in (5, 6, 9) else "DEBUG" if i == 7 else "INFO")

    compared(levels, between)


def test_a_logger_that_is_disabled_between_calls() -> None:
    try:
        compared(levels, lambda i: logging.disable(logging.CRITICAL if i % 4 == 3 else 0))
    finally:
        logging.disable(0)


def in_the_step(loss: Tensor, twin: Any) -> None:
    logging.getLogger("tests.calls.inner").info("loss %.3f", loss.item())


def test_a_logger_that_only_the_step_finds() -> None:
    inner = logging.getLogger("tests.calls.inner")
    try:
        captured = compared(
            in_the_step, lambda i: inner.setLevel("ERROR" if i < 4 or i == 9 else "NOTSET")
        )
    finally:
        inner.setLevel("NOTSET")
    assert captured.stats.replays >= 4


def an_exception(loss: Tensor, twin: Any) -> None:
    try:
        raise ValueError
    except ValueError:
        logger.exception("failed")


def a_stack(loss: Tensor, twin: Any) -> None:
    logger.info("here", stack_info=True)


def an_object(loss: Tensor, twin: Any) -> None:
    logger.info("%s", twin.model)


OWN = logging.Logger("own")
OWN.addHandler(logging.NullHandler())


def an_own_logger(loss: Tensor, twin: Any) -> None:
    OWN.error("a step")


def a_record(loss: Tensor, twin: Any) -> None:
    logger.handle(logger.makeRecord("a", 40, "file", 1, "a step", (), None))


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (an_exception, "logs an exception or a stack at "),
        (a_stack, "logs an exception or a stack at "),
        (an_object, "logs a Linear at "),
        (an_own_logger, "logs by a logger of its own at "),
        (a_record, "logs at "),
    ],
)
def test_a_message_that_a_replay_cannot_repeat_is_refused(after: Any, what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager_differs = after is a_stack  # the stack has the frames of this library
        message = (
            refused(after) if not eager_differs else "logs an exception or a stack at " + __file__
        )
    assert message.startswith(what)


class Raising(logging.Handler):
    """Raises at one call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.calls += 1
        if self.calls == 7:
            raise OSError("the disk is full")


def test_an_exception_of_a_handler_propagates_and_the_step_does_not_run_again() -> None:
    import functionalize as fz

    from .twins import Twin, batch

    def after(loss: Tensor, twin: Any) -> None:
        logger.error("a step")

    handler = Raising()
    logger.addHandler(handler)
    logger.propagate = False
    eager, other = Twin(lambda loss, twin: None), Twin(after)
    captured = fz.capture(other.step)
    try:
        for i in range(10):
            eager.step(batch(i))
            if i == 6:
                with pytest.raises(OSError, match="the disk is full"):
                    captured(batch(i))
            else:
                captured(batch(i))
            assert other.state() == eager.state()
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    assert handler.calls == 10
    assert captured.stats.replays >= 6
