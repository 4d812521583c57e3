"""The parts of the contract suites; take them from `collections_contract` and `store_contract`."""
