"""tf.train.Example messages, which TensorFlow's libraries write, without TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


def features_of(example: bytes) -> Mapping[str, Any]:
    """The features by name of a serialized message; each has one of float_list, int64_list and bytes_list."""
    return _example_class().FromString(example).features.feature


@functools.cache
def _example_class() -> Any:
    """The class of tf.train.Example messages, which is made here since its package is TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field: Any = descriptor_pb2.FieldDescriptorProto
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="pfljax", syntax="proto3"
    )

    def add(
        owner: Any, name: str, number: int, kind: int, of: str = "", many: bool = False
    ) -> None:
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        owner.field.add(
            name=name,
            number=number,
            type=kind,
            label=label,
            type_name=f".pfljax.{of}" if of else None,
        )

    kinds = {"Bytes": field.TYPE_BYTES, "Float": field.TYPE_FLOAT, "Int64": field.TYPE_INT64}
    feature, features, example = (
        file.message_type.add(name=name) for name in ("Feature", "Features", "Example")
    )
    for number, (name, kind) in enumerate(kinds.items(), start=1):
        add(file.message_type.add(name=f"{name}List"), "value", 1, kind, many=True)
        add(feature, f"{name.lower()}_list", number, field.TYPE_MESSAGE, f"{name}List")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING)
    add(entry, "value", 2, field.TYPE_MESSAGE, "Feature")
    add(features, "feature", 1, field.TYPE_MESSAGE, "Features.FeatureEntry", many=True)
    add(example, "features", 1, field.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pfljax.Example"))
