"""Builds a kustomization like `kubectl kustomize`, for what deploy/k8s uses and nothing more: resources, components,
namespace, configMapGenerator, patches (strategic merge and JSON), replacements and images. Anything else is an error.

The hash that the real tool appends to the names of generated ConfigMaps is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "configMapGenerator",
    "patches",
    "images",
    "replacements",
}
# By what the entries of a list are matched when it is merged; other lists are replaced.
_MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}
_CLUSTER_WIDE = {"Namespace"}


def build(folder: Path) -> list[Resource]:
    """The resources of a kustomization. Raises AssertionError when it uses what this does not know."""
    return _apply(folder.resolve(), [])


def _apply(folder: Path, resources: list[Resource]) -> list[Resource]:
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(plan) <= _KNOWN, f"{folder}: {sorted(set(plan) - _KNOWN)}"
    for name in plan.get("resources", []):
        source = (folder / name).resolve()
        resources += build(source) if source.is_dir() else _documents(source, folder)
    for generator in plan.get("configMapGenerator", []):
        _generate(folder, generator, resources)
    for name in plan.get("components", []):
        component = (folder / name).resolve()
        assert yaml.safe_load((component / "kustomization.yaml").read_text(encoding="utf-8"))["kind"] == "Component"
        resources = _apply(component, resources)
    for patch in plan.get("patches", []):
        resources = _patch(folder, patch, resources)
    if "namespace" in plan:
        for resource in resources:
            if resource["kind"] not in _CLUSTER_WIDE:
                resource["metadata"]["namespace"] = plan["namespace"]
    for replacement in plan.get("replacements", []):
        _replace(replacement, resources)
    for image in plan.get("images", []):
        _rename(image, resources)
    keys = [(r["apiVersion"], r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(keys) == len(set(keys)), f"{folder}: defined twice: {sorted(k for k in keys if keys.count(k) > 1)}"
    return resources


def _documents(path: Path, folder: Path) -> list[Resource]:
    # kubectl refuses files outside of the kustomization's own folder
    assert path.is_relative_to(folder), path
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def _generate(folder: Path, plan: dict[str, Any], resources: list[Resource]) -> None:
    assert set(plan) <= {"name", "behavior", "envs", "files"}, plan
    data: dict[str, str] = {}
    for name in plan.get("envs", []):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                key, _, value = line.partition("=")
                data[key] = value
    for entry in plan.get("files", []):
        key, _, name = entry.rpartition("=")
        data[key or Path(name).name] = (folder / name).read_text(encoding="utf-8")
    if plan.get("behavior") == "merge":
        (found,) = (r for r in resources if r["kind"] == "ConfigMap" and r["metadata"]["name"] == plan["name"])
        found["data"].update(data)
    else:
        resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": plan["name"]}, "data": data})


def _patch(folder: Path, plan: dict[str, Any], resources: list[Resource]) -> list[Resource]:
    assert set(plan) <= {"path", "patch", "target"}, plan
    text = plan.get("patch") or (folder / plan["path"]).read_text(encoding="utf-8")
    change = yaml.safe_load(text)
    hits = [resource for resource in resources if _selected(resource, plan["target"])]
    for resource in hits:
        if isinstance(change, list):
            _change(resource, change)
        else:
            name = resource["metadata"]["name"]
            resource.update(_merged(resource, change))
            resource["metadata"]["name"] = name
    return resources


def _replace(plan: dict[str, Any], resources: list[Resource]) -> None:
    """A field's value into fields of others, as a whole or as the part in front of the first delimiter."""
    assert set(plan) <= {"source", "targets"}, plan
    source = plan["source"]
    value: Any = _one(source["kind"], source["name"], resources)
    for part in source["fieldPath"].split("."):
        value = value[part]
    if delimiter := source.get("options", {}).get("delimiter"):
        value = value.partition(delimiter)[0]
    for target in plan["targets"]:
        assert set(target) <= {"select", "fieldPaths", "options"}, target
        delimiter = target.get("options", {}).get("delimiter")
        for field in target["fieldPaths"]:
            *path, last = field.split(".")
            for resource in (resource for resource in resources if _selected(resource, target["select"])):
                for place in _places(resource, path):
                    # without `options: {create: true}` the field must be there
                    assert last in place, field
                    place[last] = delimiter.join([value, *place[last].split(delimiter)[1:]]) if delimiter else value


def _places(value: Any, path: list[str]) -> Iterator[Any]:
    """The values at a path, whose parts are keys, `*` for all entries of a list, or `[key=value]` for one of them."""
    if not path:
        yield value
        return
    part, *rest = path
    if part == "*":
        for entry in value:
            yield from _places(entry, rest)
    elif named := re.fullmatch(r"\[(\w+)=(.*)\]", part):
        (entry,) = (entry for entry in value if entry[named[1]] == named[2])
        yield from _places(entry, rest)
    else:
        yield from _places(value[part], rest)


def _one(kind: str, name: str, resources: list[Resource]) -> Resource:
    (found,) = (r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name))
    return found


def _selected(resource: Resource, target: dict[str, str]) -> bool:
    assert set(target) <= {"kind", "name", "labelSelector"}, target
    labels = resource["metadata"].get("labels", {})
    for term in filter(None, target.get("labelSelector", "").split(",")):
        key, different, value = re.fullmatch(r"([^!=]+)(!?)=(.*)", term).groups()  # type: ignore[union-attr]
        if (labels.get(key) == value) is bool(different):
            return False
    kind, name = target.get("kind", ".*"), target.get("name", ".*")
    return bool(re.fullmatch(kind, resource["kind"]) and re.fullmatch(name, resource["metadata"]["name"]))


def _change(resource: Resource, operations: list[dict[str, Any]]) -> None:
    for operation in operations:
        assert operation["op"] == "remove", operation
        *path, last = operation["path"].strip("/").split("/")
        place = resource
        for part in path:
            place = place[part]
        del place[last]


def _merged(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), value, name) for name, value in new.items()}}
    by = _MERGE_KEYS.get(key)
    if by and isinstance(old, list) and isinstance(new, list):
        known = {item[by]: item for item in old}
        fresh = [item for item in new if item[by] not in known]
        news = {item[by]: item for item in new}
        return [_merged(item, news.get(item[by], {})) for item in old] + deepcopy(fresh)
    return deepcopy(new)


def containers(resource: Resource) -> Iterator[dict[str, Any]]:
    """The containers of a workload; none of what is no workload."""
    spec = resource.get("spec", {}).get("template", {}).get("spec", {})
    yield from spec.get("initContainers", [])
    yield from spec.get("containers", [])


def _rename(image: dict[str, str], resources: list[Resource]) -> None:
    for resource in resources:
        for container in containers(resource):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def normal(resources: list[Resource]) -> list[str]:
    """Resources in a form in which two builds can be compared: order and generated hashes play no part."""
    names = {r["metadata"]["name"] for r in resources if r["kind"] == "ConfigMap"}
    short = {name: re.sub(r"-[0-9a-z]{10}$", "", name) for name in names}

    def plain(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: plain(part, name) for name, part in value.items()}
        if isinstance(value, list):
            parts = [plain(part) for part in value]
            return sorted(parts, key=lambda p: json.dumps(p, sort_keys=True)) if key in _MERGE_KEYS else parts
        return short.get(value, value) if key == "name" else value

    return sorted(json.dumps(plain(resource), sort_keys=True) for resource in resources)
