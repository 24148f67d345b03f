"""Code that scripts/gen_proto.sh generates from proto/. Not edited by hand."""
