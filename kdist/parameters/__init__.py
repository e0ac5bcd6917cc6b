"""The values that training changes, on parameter servers or in this process: a tower, whose floors use those below.

`placement` decides which server holds what, and how it travels; `tables` keep rows of embeddings; `values` are all by
name, to read and to save; `optimizer` applies gradients; `store` joins them: pull, push, read, write; `aggregation`
makes one gradient of several.
"""
