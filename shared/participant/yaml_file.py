"""A YAML file that an operator has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(path: Path) -> Any:
    """What the file says; None where it is empty.

    Raises ValueError, in words, when it cannot be read, is not YAML in UTF-8, or names something twice: YAML itself
    keeps the last of the two, and what the other says is lost.
    """
    # most processes have no such file, and save a megabyte
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = set[str]()
            for key, _ in node.value:
                # the key that merges may stand there twice; one that is no scalar is refused below
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} stands there twice", key.start_mark
                    )
                names.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except UnicodeDecodeError as exc:
        raise ValueError(f"it is not UTF-8: {exc}") from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    except OSError as exc:
        raise ValueError(exc.strerror or str(exc)) from exc
    except yaml.YAMLError as exc:
        raise ValueError(str(exc).replace('in "<unicode string>", ', "")) from exc
