"""3v3 snakes of the Jidi competition, for many boards at once, as loops that Numba compiles. README.md says where to
begin."""

from omagd.utils.compiling import require_numba

require_numba("env=snakes_3v3")
