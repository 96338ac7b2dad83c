"""tf.train.Example messages, which TensorFlow's libraries write, without TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


def parse_example(example: bytes) -> Mapping[str, Any]:
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

    def add_field(
        message: Any,
        name: str,
        number: int,
        field_type: int,
        type_name: str = "",
        many: bool = False,
    ) -> None:
        message.field.add(
            name=name,
            number=number,
            type=field_type,
            label=field.LABEL_REPEATED if many else field.LABEL_OPTIONAL,
            type_name=f".pfljax.{type_name}" if type_name else None,
        )

    # Feature has one of three lists.
    feature = file.message_type.add(name="Feature")
    features = file.message_type.add(name="Features")
    example = file.message_type.add(name="Example")
    list_types = {"Bytes": field.TYPE_BYTES, "Float": field.TYPE_FLOAT, "Int64": field.TYPE_INT64}
    for number, (name, value_type) in enumerate(list_types.items(), start=1):
        values = file.message_type.add(name=f"{name}List")
        add_field(values, "value", 1, value_type, many=True)
        add_field(feature, f"{name.lower()}_list", number, field.TYPE_MESSAGE, f"{name}List")

    # Features is a map from names to Feature.
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add_field(entry, "key", 1, field.TYPE_STRING)
    add_field(entry, "value", 2, field.TYPE_MESSAGE, "Feature")
    add_field(features, "feature", 1, field.TYPE_MESSAGE, "Features.FeatureEntry", many=True)
    add_field(example, "features", 1, field.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pfljax.Example"))
