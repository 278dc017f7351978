"""What judges a finished rollout: functions and the processes that call them, classifiers, services; `README.md`.

May import `data/`, `models/`, `parallel/` (the device, settings of roles), `types/` and `config/`; imported by
workers and controllers. A reward of yours may live in any module: name it `module:name` in `reward.functions`.
"""
