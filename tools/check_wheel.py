# SPDX-License-Identifier: Apache-2.0
"""check_wheel.py WHEEL MEGABYTES: refuses a wheel that would not travel. It may not be larger than that, may not bring
shared libraries of the building machine along, may link only what every Linux has, and may show one symbol only: other
libraries in the process must not meet the copies of fmt, Highway, the C++ library and CUDA's runtime that are inside.
"""

import io
import sys
import zipfile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def main(path, megabytes):
    with zipfile.ZipFile(path) as wheel:
        size = sum(item.compress_size for item in wheel.infolist())
        modules = [name for name in wheel.namelist() if ".so" in name]
        if len(modules) != 1 or not modules[0].startswith("gradwire/_core."):
            sys.exit(f"{path}: one module is expected, gradwire/_core; there are {modules}")
        names = set(wheel.namelist())
        for name in ("gradwire/py.typed", "gradwire/torch/__init__.py"):
            if name not in names:
                sys.exit(f"{path}: {name} is missing")
        elf = ELFFile(io.BytesIO(wheel.read(modules[0])))
    if size > megabytes * 1e6:
        sys.exit(f"{path}: {size} bytes; allowed are {megabytes} MB")
    dynamic = next(section for section in elf.iter_sections() if isinstance(section, DynamicSection))
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    if needed - SYSTEM:
        sys.exit(f"{path}: links {sorted(needed - SYSTEM)}, which not every machine has")
    shown = [
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    ]
    if shown != ["PyInit__core"]:
        sys.exit(f"{path}: shows {len(shown)} symbols, among them {shown[:5]}; PyInit__core alone is expected")
    print(f"{path}: {size / 1e6:.1f} MB, links {', '.join(sorted(needed))}")


main(sys.argv[1], float(sys.argv[2]))
