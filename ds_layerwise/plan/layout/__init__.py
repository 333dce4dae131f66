"""The layout: buckets, shards and owners."""
