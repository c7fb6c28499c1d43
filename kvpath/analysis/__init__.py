"""What a model costs and how models are made comparable: audits, matching, drawings."""
