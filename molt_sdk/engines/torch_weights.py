"""Loading a model for the torch engine, and replacing its weights all at once or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from molt_sdk.engines.base import NamedTensors
from molt_sdk.errors import EngineError, ModelPathError

Staged = list[tuple[Tensor, Tensor]]
"""(tensor of the model, its new value) once for every distinct tensor."""


def load_model(path: str, dtype: torch.dtype, device: str) -> Any:
    """The causal language model of a directory, ready to generate. Only safetensors are read, never a pickle.

    Raises:
        ModelPathError: it cannot be loaded.
    """
    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
            raise ModelPathError(f"model directory {path} cannot be loaded: {error}") from error
    module: torch.nn.Module = model
    return module.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers, and its settings as before afterwards."""
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def stage(model: Any, weights: NamedTensors) -> Staged:
    """Copy ``weights`` to the model's dtype and device and check them; the model stays as it is.

    Names are those of the model's state dict. Of tensors that share memory (tied embeddings) one name is enough.

    Raises:
        EngineError: a name is unknown, missing or given twice, or a tensor has a wrong shape, type or value.
    """
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    staged: dict[int, tuple[Tensor, Tensor]] = {}
    names: dict[int, str] = {}
    problems: list[str] = []
    unknown: list[str] = []
    loaded = 0
    for name, tensor in weights:
        target = known.get(name)
        if target is None:
            unknown.append(name)
            continue
        problem = _problem(name, tensor, target)
        if problem is None:
            new = tensor.detach().to(device=target.device, dtype=target.dtype, copy=True)
            if id(target) in staged and not torch.equal(staged[id(target)][1], new):
                problem = f"{name} differs from {names[id(target)]}, with which it is tied here"
            elif not _finite(new):
                problem = f"{name} has values that are not finite in {target.dtype}"
        if problem is not None:
            problems.append(problem)
            continue
        staged[id(target)], names[id(target)] = (target, new), name
        loaded += 1
    wrong = {problem.split()[0] for problem in problems}
    missing = [name for name, target in known.items() if id(target) not in staged and name not in wrong]
    if unknown or problems or missing:
        found = [f"{len(unknown)} unknown names ({_sample(unknown)})"] if unknown else []
        found += [f"{len(missing)} missing names ({_sample(missing)})"] if missing else []
        found += problems[:3] + ([f"{len(problems) - 3} more"] if len(problems) > 3 else [])
        raise EngineError(
            f"torch engine: update_weights refused, loaded {loaded} of {len(known)} tensors, the old weights stay in "
            f"force: {'; '.join(found)}. Names and shapes must be those of the model's Hugging Face checkpoint"
        )
    return list(staged.values())


def install(staged: Staged) -> None:
    """Put staged values in force; nothing here can fail half-way."""
    for target, new in staged:
        target.data = new


def _problem(name: str, tensor: Any, target: Tensor) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, not a tensor"
    if tensor.shape != target.shape:
        return f"{name} has shape {list(tensor.shape)} instead of {list(target.shape)}"
    if tensor.is_floating_point() != target.is_floating_point():
        return f"{name} has dtype {tensor.dtype}, which does not fit {target.dtype}"
    return None


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, most = tensor.aminmax()  # NaN if there is one; many times faster than looking at each value
    return bool(torch.isfinite(least) & torch.isfinite(most))


def _sample(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
