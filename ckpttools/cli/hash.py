"""`ckpttools hash`."""

from __future__ import annotations

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.session import snapshot_bytes, take_roots
from ckpttools.errors import ExitCode

_EPILOG = options.examples(
    "ckpttools hash model.safetensors",
    "ckpttools hash checkpoint/step-1000 --algorithm sha256 --json > step-1000.hashes.json",
    "ckpttools hash gs://bucket/run/step-1000 -j 8",
)


@click.command("hash", epilog=_EPILOG)
@options.path
@options.roots
@options.algorithm
@options.running
def command(
    path: str, roots: tuple[str, ...], algorithm: str, is_json: bool, jobs: int, memory: int, quiet: bool, verbose: bool
) -> ExitCode:
    """Print a digest per tensor, and the fingerprint of all.

    The digest is over the tensor's logical values alone, row-major and little-endian, so the same weights give the
    same digests in a torch file, in safetensors and in a sharded checkpoint on any number of ranks. It does not cover
    objects that are not tensors, nor the files themselves.
    """
    from ckpttools.operations.sealing import hash_tensors

    location, further = take_roots(path, roots)
    with render.progress("hashing", snapshot_bytes(location, further), is_quiet=quiet, is_verbose=verbose) as report:
        hashes = hash_tensors(location, roots=further, algorithm=algorithm, jobs=jobs, memory_bytes=memory, progress=report)
    if is_json:
        render.write_json(documents.hash_list(hashes))
        return ExitCode.OK
    if algorithm != "blake3":
        render.write_data(f"# algorithm: {algorithm}")
    for tensor in hashes.tensors:
        render.write_data(tensor.listed_line)
    render.write_data(f"{hashes.fingerprint}  fingerprint")
    return ExitCode.OK
