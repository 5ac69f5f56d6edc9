"""A driver for `ray job submit`: has an agent look after one request, once, however often it is submitted."""

import argparse
import signal
import sys

from shop import order, price

from understudy import AgentSpec, Cluster, UnderstudyError


def main() -> int:
    """Send the request, wait for its result, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", help="its id: the same id is the same work")
    parser.add_argument("text")
    parser.add_argument("--cancel-on-stop", action="store_true", help="`ray job stop` ends the agent's run as well")
    given = parser.parse_args()
    with Cluster.connect() as cluster:
        # After connect: Ray sets a handler of its own. SIGTERM is what `ray job stop` sends, 3 s before SIGKILL.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        spec = AgentSpec(name="buyer", instructions="You buy for an office. Be brief.", tools=[price, order])
        session = cluster.spawn(spec, session_id=f"buyer-{given.request}")
        try:
            run = session.send(given.text, run_id=given.request)
            print(f"session {session.id}, run {run.run_id}", flush=True)
            result = run.result()
        except KeyboardInterrupt:
            if given.cancel_on_stop:
                run.cancel("the job was stopped")
                print("stopped, and cancelled the run")
            else:
                print(f"stopped; the run goes on. Submit again to wait for it, or: understudy show {session.id}")
            return 1
    print(result.text)
    return 0 if result.status == "completed" else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnderstudyError as error:  # says what to do; a traceback would only hide that
        sys.exit(f"error {error}")
