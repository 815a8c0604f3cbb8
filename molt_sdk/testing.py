"""Test doubles for users' own tests: a scripted engine with a real tokenizer, and a tiny random model."""

from molt_sdk.engines.scripted import Script, ScriptedEngine
from molt_sdk.pocket import TEMPLATES, pocket_model

__all__ = ["TEMPLATES", "Script", "ScriptedEngine", "pocket_model"]
