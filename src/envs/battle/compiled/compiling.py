"""The compiler of the battles: what the kernels do depends on all source of `omagd.envs.battle`."""

from __future__ import annotations

from pathlib import Path

from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__).resolve().parents[1], "battles")
function, kernel = compiler.function, compiler.kernel
