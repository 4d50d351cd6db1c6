"""Pages of the KV pool and who may read them. No torch here: ids and numbers only.

Reading order: `namespace` (keys and digests), `page_pool` (who holds which page), `prefix_index` (which prefix lies on
which page), `held_prefixes` (what others are told of it), `page_cache` (all together: match, allocate, publish, release), `page_table` (the pages of
one sequence).
"""
