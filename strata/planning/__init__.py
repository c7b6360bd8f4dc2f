"""Planning: a budget to steps (search), steps to rounds (schedules)."""
