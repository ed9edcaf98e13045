"""The compiler of the battles: what the kernels do depends on all source of `omagd.envs.battle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__).resolve().parents[1], "battles", "10 to 20 s", late=True, checked=False)
function, kernel = compiler.function, compiler.kernel


def _memory_rows(typing: Any, memory: Any, first: Any, count: Any, width: Any, dtype: Any) -> Any:
    """Return `count` rows of `memory` [.., width], which has 4 bytes a number, from row `first` on as another type.

    The compiler knows the array's shape, and that no two rows overlap: loops over rows need no test for that, which
    takes longer than the loop itself for a dozen of units.
    """
    shape, item = (count.literal_value, width.literal_value), dtype.dtype.bitwidth // 8
    array = types.Array(dtype.dtype, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, out = context.get_value_type(types.intp), make_array(array)(context, builder)
        start = builder.gep(
            make_array(memory)(context, builder, arguments[0]).data, [number(first.literal_value * shape[1])]
        )
        populate_array(
            out,
            data=builder.bitcast(start, context.get_data_type(array.dtype).as_pointer()),
            shape=[number(shape[0]), number(shape[1])],
            strides=[number(shape[1] * item), number(item)],
            itemsize=number(item),
            meminfo=None,
        )
        return out._getvalue()

    return array(memory, first, count, width, dtype), generate


memory_rows: Any = intrinsic(prefer_literal=True)(_memory_rows)
