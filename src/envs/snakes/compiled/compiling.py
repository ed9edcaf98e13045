"""The compiler of the snakes: what the kernels do depends on all source of `omagd.envs.snakes`."""

from __future__ import annotations

from pathlib import Path

from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__).resolve().parents[1], "snakes", "5 to 10 s")
function, kernel = compiler.function, compiler.kernel
