"""`jaxllm links`: how fast host memory reaches each device."""

from __future__ import annotations

import argparse
import os
from itertools import product
from typing import TYPE_CHECKING, Any

from jaxllm.cli.options import add_again, add_command
from jaxllm.errors import OptionError
from jaxllm.json_text import to_json
from sharding import format_bytes

if TYPE_CHECKING:
    from sharding import Mesh

_EXAMPLES = """\
  jaxllm links
  jaxllm links --copy-mib 1,4,16,64 --again
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Measure how fast pages in host memory reach each device"
    parser = add_command(subparsers, "links", run, summary, _EXAMPLES)
    parser.add_argument("--devices", type=int, metavar="N", help="devices (default all)")
    sizes = "sizes of a copy in MiB (default 1,4,16,64)"
    parser.add_argument("--copy-mib", default="1,4,16,64", metavar="SIZES", help=sizes)
    ahead = "copies in flight (default 4)"
    parser.add_argument("--prefetch", "--kv-prefetch", type=int, default=4, metavar="N", help=ahead)
    add_again(parser)


def run(args: argparse.Namespace) -> int:
    """Print a row for every device, kind of host memory and size of a copy."""
    from jaxllm.llm import open_mesh
    from jaxllm.progress import measuring, telling
    from jaxllm.runtime import forget, links_file
    from sharding.links import Delivery, measured, places

    try:
        sizes = [int(size) for size in args.copy_mib.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise OptionError(f"--copy-mib is {args.copy_mib!r}; give whole numbers of MiB, as 1,16")
    if args.prefetch < 0:
        raise OptionError(f"--prefetch is {args.prefetch}; it must be at least 0")
    if args.again:
        forget(links_file())
    mesh = open_mesh(args.devices)
    _check_room(max(sizes) << 20, max(1, args.prefetch), mesh)
    rows = []
    with measuring(show=True) as tell:
        for place, size in product(places(mesh.jax_devices or ()), sizes):
            how = Delivery(place, size << 20, args.prefetch)
            for info in measured(mesh, how, links_file(), telling(tell)).devices:
                rows.append(
                    {
                        "device": info.label,
                        "kind": info.kind,
                        "memory": place,
                        "copy_bytes": how.group_bytes,
                        "gbps": info.link_gbps,
                    }
                )
    if args.json:
        print(to_json({"links": rows}))
        return 0
    print(f"{'device':<10}{'kind':<24}{'host memory':<14}{'copy':>8}{'GB/s':>8}")
    for row in rows:
        size = f"{row['copy_bytes'] >> 20} MiB"
        print(
            f"{row['device']:<10}{row['kind']:<24}{row['memory']:<14}{size:>8}{row['gbps']:>8.1f}"
        )
    return 0


def _check_room(size: int, in_flight: int, mesh: Mesh) -> None:
    """Refuse copies of `size` bytes that memory has no room for: one and its source on the host,
    and those in flight on a device, which for a CPU is the host as well."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for info in mesh.devices:
        flying = size * in_flight
        if info.platform == "cpu":
            needs = [("the host", 2 * size + flying, host)]
        else:
            needs = [("the host", 2 * size, host), (info.label, flying, info.free)]
        for where, needed, there in needs:
            if there is not None and needed > there:
                raise OptionError(
                    f"--copy-mib {size >> 20} needs {format_bytes(needed)} on {where}, which has "
                    f"{format_bytes(there)}; give smaller sizes, or a smaller --prefetch"
                )
