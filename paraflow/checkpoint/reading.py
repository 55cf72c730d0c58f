"""Reads checkpoints: damage is found before anything is taken, and large tensors stay on disk until they are wanted."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from paraflow.checkpoint.format import CHECKSUMS, STATE, VERSION
from paraflow.checkpoint.image import Image, put_together
from paraflow.checkpoint.index import disagreement, save_of
from paraflow.checkpoint.stored import in_memory, stored_in
from paraflow.errors import CheckpointError

_TENSORS = re.compile(r"tensors-\d{5,}\.safetensors")
_LEFT_ON_DISK = ("model", "optimizer", "callbacks")
ANOTHER = "Use another: `paraflow inspect FOLDER --verify` says which are intact, and resume='auto' takes the newest."
"""What every sentence about damage ends with."""


def read(folder: Path) -> dict[str, Any]:
    """Reads the state of a folder into memory; damage is found before anything is taken from it.

    Raises:
        CheckpointError: The folder is no checkpoint, is damaged, or is of another version.
    """
    verify(folder)
    state: dict[str, Any] = in_memory(take(folder))
    return state


def take(folder: Path) -> dict[str, Any]:
    """Returns the state of a folder that has just been verified, on this rank or another.

    The tensors of the model, the optimizer and the callbacks are left on disk (`Stored`), the others are read.

    Raises:
        CheckpointError: The folder is no checkpoint, or is of another version.
    """
    from safetensors import SafetensorError

    content = _content(folder)
    try:
        tensors = stored_in(folder, content["index"])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} does not say where tensors are: {error!r}.") from error
    try:
        state: dict[str, Any] = put_together(Image(content.get("state"), tensors))
    except KeyError as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} lacks the tensor {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is not of the form of a state: {error}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"The checkpoint {str(folder)!r} holds no state but a {type(state).__name__}.")
    return {key: value if key in _LEFT_ON_DISK else in_memory(value) for key, value in state.items()}


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is of version {version!r}, and this Paraflow reads {VERSION}."
        )
    return content  # type: ignore[no-any-return]


def verify(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Finds damage before anything is taken from a folder.

    Args:
        folder: The checkpoint.
        rank: Which share of the files of tensors is looked at; several ranks can divide them.
        ranks: The number of shares.

    Raises:
        CheckpointError: A file is missing, is not as it was written, or was written by another save.
    """
    _require_files(folder, [STATE, CHECKSUMS])
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        whole = sums.get(STATE) == _checksum(folder / STATE)
        names = sorted(name for name in sums if _TENSORS.fullmatch(name))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The checksums of {str(folder)!r} cannot be read: {error}.") from error
    if not whole:
        raise _damage(folder, [STATE])
    content = _content(folder)
    files = content.get("files")
    if not isinstance(files, dict) or sorted(files) != names:
        raise CheckpointError(f"The checksums of {str(folder)!r} are of other files than it has. {ANOTHER}")
    _require_files(folder, names)
    _verify_tensors(folder, names[rank::ranks], content, sums)


def skim(folder: Path) -> None:
    """Finds what can be found without reading tensors: files that are missing, too short or long, or of another save.

    Raises:
        CheckpointError: Something is wrong with it.
    """
    _require_files(folder, [STATE, CHECKSUMS])
    content = _content(folder)
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        files = content["files"]
        if files.keys() | {STATE} != sums.keys():
            raise CheckpointError(f"The checksums of {str(folder)!r} are of other files than it has. {ANOTHER}")
        _require_files(folder, sorted(files))
        strange = [name for name in sorted(files) if save_of(folder / name) not in (content.get("save"), None)]
        changed = [name for name, size in files.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    if strange:
        raise _strange(folder, strange)
    if changed:
        raise _damage(folder, changed)


def _verify_tensors(folder: Path, names: list[str], content: dict[str, Any], sums: dict[str, str]) -> None:
    try:
        damaged = [name for name in names if sums[name] != _checksum(folder / name)]
        strange = [name for name in names if save_of(folder / name) not in (content.get("save"), None)]
        if damaged:
            raise _damage(
                folder, [f"{name} (which says it is of another save)" if name in strange else name for name in damaged]
            )
        if strange:
            raise _strange(folder, strange)
        problem = next((text for name in names if (text := disagreement(folder / name, content["index"]))), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    if problem:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is not what it says: {problem}. {ANOTHER}")


def _require_files(folder: Path, names: list[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        lacking = " and no ".join(missing)
        raise CheckpointError(f"{str(folder)!r} is no whole checkpoint: it has no {lacking}. {ANOTHER}")


def _strange(folder: Path, names: list[str]) -> CheckpointError:
    what = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not of this one"
    return CheckpointError(f"The checkpoint {str(folder)!r} is put together from two saves: {what}. {ANOTHER}")


def _damage(folder: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} is damaged: {' and '.join(names)} changed since it was written. {ANOTHER}"
    )


def identity_of(folder: Path) -> str:
    """Returns which save a checkpoint is of.

    Raises:
        CheckpointError: It cannot be read, or is of another version.
    """
    return str(_content(folder).get("save"))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
