"""Every exception that Foreword raises on purpose.

    ForewordError
    ├── InputError            what the caller gave cannot be used (also a ValueError)
    │   ├── UnknownMethod     no such method; names the nearest
    │   └── PromptError       empty, too long for the context, unreadable prompt file
    ├── ModelError            the target cannot be loaded or cannot be served
    │   ├── ModelNotFound     no such folder, file or hub id, or no way to reach it
    │   ├── ModelCorrupt      the bytes are not what they should be
    │   └── ModelUnsupported  a family, quantisation or layout that Foreword does not support
    ├── DrafterError          this drafter cannot serve this target
    ├── DataError             training data is damaged, of another model, or made with other settings
    ├── CapacityError         the KV cache does not fit into the free memory
    ├── QueueFull             too many requests wait for a slot
    ├── GrammarError          a grammar allows no token that other settings leave
    ├── StorageError          the cache folder cannot be written, or the disk is full
    ├── NumericsError         the target answered NaN
    └── EngineError           the engine broke, or its process ended

A message says what was given, what is needed, and what to do. The command line prints it and exits with status 2.
"""


class ForewordError(Exception):
    """The base class: catch this to catch all of them."""


class InputError(ForewordError, ValueError):
    """What the caller gave cannot be used."""


class UnknownMethod(InputError):
    """No method has this name."""


class PromptError(InputError):
    """A prompt is empty, too long or unreadable."""


class ModelError(ForewordError):
    """The target cannot be loaded or served."""


class ModelNotFound(ModelError):
    """There is no model where the caller pointed."""


class ModelCorrupt(ModelError):
    """A model file is damaged."""


class ModelUnsupported(ModelError):
    """Foreword does not support this model."""


class DrafterError(ForewordError):
    """A drafter cannot serve this target."""


class DataError(ForewordError):
    """A folder of training data cannot be used or continued."""


class CapacityError(ForewordError):
    """The KV cache does not fit."""


class QueueFull(ForewordError):
    """Too many requests wait for a slot."""


class GrammarError(ForewordError):
    """A grammar allows no token that other settings leave."""


class StorageError(ForewordError):
    """The cache folder cannot be written."""


class NumericsError(ForewordError):
    """The target answered NaN."""


class EngineError(ForewordError):
    """The engine broke, or its process ended."""


class ForewordWarning(UserWarning):
    """Something works, but not as well as the caller may expect."""
