"""The judge: a pytest suite that any lossless collective can be held against, through a `Subject`."""
