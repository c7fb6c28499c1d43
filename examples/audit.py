"""What a model costs, in three lines."""

import kvpath

config = kvpath.load_config("model/98m", "attention/kvpath_concat")
costs = kvpath.audit(config.backbone, context=8192, name=config.name)
print(f"{costs.name}: {costs.parameters:,} parameters, {costs.stored_elements_per_token:,.0f} elements a token")
