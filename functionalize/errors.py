"""The whole exception tree.

A user's mistake or an unsupported program raises a `FunctionalizeError` subclass whose message says what
happened, to which tensor, where (the user's line), and what to do. A bug of ours raises `InvariantError`.
`FunctionalizeError` is a `RuntimeError`, as the errors eager PyTorch raises for the same programs are.
"""

from __future__ import annotations


class FunctionalizeError(RuntimeError):
    """Base of every error a user can cause; names the op, the tensor, the sizes and the user's line."""


class StorageError(FunctionalizeError):
    """A program uses a storage in a way that its size or contents do not allow."""


class EmptyStorageError(StorageError):
    """Data is read or written while the storage holds 0 bytes."""


class UndefinedContentsError(StorageError):
    """Data is read after a storage was grown and before anything was written to it."""


class OutOfBoundsError(StorageError):
    """A tensor reaches past the end of its storage, for example after a shrink."""


class ResizeError(StorageError):
    """A resize to a size that is negative, not an integer, or of a storage that cannot be resized."""


class ForeignStorageError(StorageError):
    """A resize or mutation of a storage that belongs to no tensor of the program."""


class OverlappingMutationError(FunctionalizeError):
    """A write through a view in which several elements share one memory location."""


class UnorderedMutationError(OverlappingMutationError):
    """A write of what the op reads through an expanded view: its result depends on the order of the writes."""


class UnsupportedOpError(FunctionalizeError):
    """An op that mutates and has no functional form, or whose effect is not known."""


class UnsupportedTensorError(FunctionalizeError):
    """A tensor that has no storage of its own (sparse, functorch wrappers), or is more than one (quantised, nested)."""


class UncapturableError(FunctionalizeError):
    """A step does something that a program cannot hold, such as state that never settles."""


class UncapturableWarning(UserWarning):
    """A step, or some of its calls, cannot be captured and runs eagerly: why, at which line, and what to change."""


class TargetError(FunctionalizeError):
    """A plan lacks a property of its target device, or would have to assume one that was not passed."""


class EagerError(FunctionalizeError):
    """The program failed in eager PyTorch while it was recorded; `__cause__` is eager's own exception."""


class GuardError(FunctionalizeError):
    """A replay was refused because a fact the capture relied on no longer holds; nothing was changed."""


class AuditError(FunctionalizeError):
    """An audited call did other things than its program would have; the step has run, and the program was dropped."""


class LostRankError(FunctionalizeError):
    """Another rank has ended or cannot be reached, so the ranks cannot agree on a call; `__cause__` is what was raised.

    Nothing of the call has run. The group of ranks is of no use any more, in eager neither.
    """


class PassError(FunctionalizeError):
    """A pass was applied at a stage, or with an option, that it does not accept."""


class UnknownValueError(PassError):
    """The size of a value is not known: of an op without a fake kernel, for sizes that were not recorded."""


class CompileError(FunctionalizeError):
    """A runner (`compile="inductor"`, `"cudagraphs"`) cannot take a program; nothing has run."""


class VerifyError(FunctionalizeError):
    """A program breaks an invariant; the message lists every violation."""


class WorldError(FunctionalizeError):
    """A fake world cannot be made here, or a step needs data that its tensors do not have."""


class AllocatorSettingsError(FunctionalizeError):
    """An option of the simulated allocator that is unknown, malformed or out of its range."""


class PlannedOutOfMemoryError(FunctionalizeError):
    """The simulated allocator cannot reserve the memory of an allocation within its limit; says what, when and why."""


class PlanError(FunctionalizeError):
    """A plan requests something that its functions, grid or model do not offer."""


class TuneError(FunctionalizeError):
    """`tune` lacks a solver or an axis to search, has an option that it cannot read, or found nothing that fits."""


class SaveError(FunctionalizeError):
    """A program refers to an object that another process could not find again by a name."""


class LoadError(FunctionalizeError):
    """A file is damaged, or its programs are for another version, world, model or step; none was loaded."""


class MemoryReportError(FunctionalizeError):
    """What a memory report does not have was requested: a timeline, constants, purposes of a graph that was changed."""


class PictureError(FunctionalizeError):
    """A picture or a page cannot be drawn: no matplotlib or plotly, an unknown kind of file, nothing to draw."""


class UsageError(FunctionalizeError):
    """An argument of the command line that cannot be read, found or done; nothing has run."""


class InvariantError(AssertionError):
    """A bug in this library, never the user's."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is outside of the range that this release of functionalize was tested with."""
