"""Which file a reference in a manifest means, where the nodes of a run each wrote a manifest of their own.

Then `__0_0.distcp` of one manifest and `__0_0.distcp` of another are different files. A reference means the file beside the
manifest; where that node lacks it, a file of the name elsewhere is taken only if it cannot be another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ckpttools.containers.dcp_manifest import Item, Manifest
from ckpttools.storage.source import Listing

_Items = dict[tuple[str, tuple[int, ...] | None], Item]


class NodeManifests:
    """The versions of one manifest that roots hold."""

    def __init__(
        self, listing: Listing, place: str, versions: Mapping[str, Sequence[str]], manifests: Mapping[str, Manifest]
    ) -> None:
        """Args: place: path of the manifest in each root. versions: a path of each -> the paths of all that are equal to it."""
        self._listing = listing
        self._directory = place[: -len(place.rpartition("/")[2])]
        listed = {path: listing.find(path) for paths in versions.values() for path in paths}
        self._version_of = {
            found.root: version for version, paths in versions.items() for path in paths if (found := listed[path]) is not None
        }
        self._items = {version: _by_file(m) for version, m in manifests.items()} if len(versions) > 1 else {}

    def file_of(self, version: str, reference: str) -> str:
        """The path, as listed, of what a reference in a version means; one that nothing is listed under where it is nowhere.

        First the file in a root of that version; then in a root without a manifest; then in a root of another
        version that has the very same items in it, as two complete manifests have.
        """
        path = self._directory + reference
        if not self._items:
            return path
        holders = self._listing.holders(path)
        own = [p for root, p in holders if self._version_of.get(root) == version]
        free = [p for root, p in holders if root not in self._version_of]
        items = self._items[version].get(reference)
        alike = [p for root, p in holders if self._items.get(self._version_of.get(root, ""), {}).get(reference) == items]
        found = next(iter((*own, *free, *alike)), None)
        if found is not None:
            return found
        home = self._listing.find(version)
        return f"{home.root}/{path}" if home is not None else path

    def copies_of(self, version: str, reference: str) -> list[str]:
        """The same file in further roots of that version; empty where all roots have one manifest."""
        if not self._items:
            return []
        holders = self._listing.holders(self._directory + reference)
        return [p for root, p in holders if self._version_of.get(root) == version][1:]


def _by_file(manifest: Manifest) -> dict[str, _Items]:
    found: dict[str, _Items] = defaultdict(dict)
    for key, item in manifest.items.items():
        found[item.file][key] = item
    return dict(found)
