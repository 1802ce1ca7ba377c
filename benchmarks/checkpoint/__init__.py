"""The demo checkpoint of the tests, and real ones that are fetched without a model hub."""
