"""The process: what an agent is made of by its settings, its session with the coordinator, its restarts and metrics.

The one folder that knows all the others. A setting is added in `settings`, and given to its part in `building`. What
the coordinator hears is the life's state as it is (INV-8): nothing is added to it on the way, or left out.
"""
