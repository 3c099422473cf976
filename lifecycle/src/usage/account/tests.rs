//! Accounts add up: over restarts of the daemon, whatever the wall clock does and whatever is not written.

use proptest::prelude::*;

use super::*;

const START: Moment = Moment { up: 5_000, wall: 1_000 * HOUR + 1 };

fn begin(phase: Phase) -> Account {
    Account::begin((2, 256), (phase, false), "this", START)
}

fn sum(hours: &Hours) -> Amounts {
    let mut sum = Amounts::default();
    hours.values().for_each(|owed| sum.add(&owed.amounts));
    sum
}

fn later(ms: u64) -> Moment {
    Moment { up: START.up + ms, wall: START.wall + ms }
}

/// Promise 67.
#[test]
fn time_is_counted_in_the_hours_it_passed_in_and_processors_and_memory_while_it_runs() {
    let mut account = begin(Phase::Other);
    account.turn(Phase::Running, later(1_000));
    account.work("p1", 500, Some((99 << 20) + 1));
    account.turn(Phase::Standby, later(HOUR + 1_000));
    account.keep(10 << 20);
    account.advance(later(3 * HOUR));
    let hours = account.take();
    assert_eq!(hours.keys().copied().collect::<Vec<_>>(), [1_000, 1_001, 1_002, 1_003]);
    let first = hours[&1_000].amounts;
    assert_eq!((first.other_ms, first.running_ms, first.cpu_ms), (1_000, HOUR - 1_001, 500));
    assert_eq!((first.vcpu_ms, first.resident_peak_mib), (2 * first.running_ms, 100));
    let all = sum(&hours);
    assert_eq!((all.running_ms, all.standby_ms), (HOUR, 2 * HOUR - 1_000));
    assert_eq!((all.memory_mib_ms, all.resident_mib_ms), (256 * HOUR, 100 * HOUR));
    assert_eq!(all.saved_mib_ms, 10 * all.standby_ms);
    assert_eq!(account.take(), Hours::new(), "once");
}

/// Promise 67. What died in between costs no more than it can have.
#[test]
fn time_without_a_daemon_counts_as_the_cheaper_of_what_it_was_and_what_it_is() {
    for (was, is, counts) in [
        (Phase::Running, Phase::Running, Phase::Running),
        (Phase::Standby, Phase::Standby, Phase::Standby),
        (Phase::Running, Phase::Standby, Phase::Standby),
        (Phase::Standby, Phase::Running, Phase::Standby),
        (Phase::Running, Phase::Other, Phase::Other),
    ] {
        let mark = begin(was).mark().clone();
        let mut next = Account::resume((2, 256), mark.clone(), is, "this", later(7_000));
        let used = sum(&next.take());
        let told = [
            (Phase::Running, used.running_ms),
            (Phase::Standby, used.standby_ms),
            (Phase::Other, used.other_ms),
        ];
        for (phase, ms) in told {
            assert_eq!(ms, if phase == counts { 7_000 } else { 0 }, "{was:?}, {is:?}: {phase:?}");
        }
        assert_eq!(next.phase(), is);
        let booted = Moment { up: 300, wall: later(HOUR).wall };
        let mut next = Account::resume((2, 256), mark, is, "another", booted);
        assert_eq!(sum(&next.take()).life_ms(), 300, "the host was off until then");
    }
}

/// Promise 67.
#[test]
fn a_process_is_counted_from_where_it_was_counted_to_and_another_one_from_nothing() {
    let mut account = begin(Phase::Running);
    account.work("p1", 700, None);
    let mark = account.mark().clone();
    let mut next = Account::resume((1, 128), mark, Phase::Running, "this", later(10));
    next.work("p1", 900, None);
    next.work("p2", 50, None);
    assert_eq!((sum(&account.take()).cpu_ms, sum(&next.take()).cpu_ms), (700, 250));
    let mut unknown = Account::begin((1, 128), (Phase::Running, true), "this", START);
    unknown.work("p1", 900, None);
    unknown.work("p1", 901, None);
    assert_eq!(sum(&unknown.take()).cpu_ms, 1, "what went before is nobody's");
}

/// Promise 67.
#[test]
fn what_cannot_be_written_for_long_is_owed_to_the_last_byte_and_stays_bounded() {
    let mut account = begin(Phase::Running);
    for hour in 0..200 {
        account.advance(later(hour * HOUR));
        let to = |n: u64| Some(format!("h{n}").into_boxed_str());
        account.carry((0..300).map(|n| Carried { to: to(n), bytes_out: 2, bytes_in: 1 }).collect());
    }
    let apart: usize = account.owed.values().map(|owed| owed.places.len()).sum();
    assert!(apart <= (PLACES + 1) * (HOURS + 1) + 200, "{apart}");
    let hours = account.take();
    let all = sum(&hours);
    assert_eq!((all.bytes_out, all.bytes_in), (200 * 300 * 2, 200 * 300));
    let placed: u64 = hours.values().flat_map(|owed| owed.places.values()).map(|one| one.0).sum();
    assert_eq!(placed, all.bytes_out);
    account.owe_again(hours.clone());
    assert_eq!(sum(&account.take()), all);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(u64),
    Turn(Phase),
    /// The wall clock is set.
    Set(i64),
    Write,
    Lost,
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let phase = prop_oneof![Just(Phase::Running), Just(Phase::Standby), Just(Phase::Other)];
    let step = prop_oneof![
        (0..3 * HOUR).prop_map(Step::Pass),
        (0_u64..5_000).prop_map(Step::Pass),
        phase.prop_map(Step::Turn),
        (-9_000_000_000_i64..9_000_000_000).prop_map(Step::Set),
        Just(Step::Write),
        Just(Step::Lost),
        Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    /// Promise 67. The sum of what it was is how long it was, in all phases and in each, whatever is
    /// written when, whatever is not, however often the daemon ends, and whatever the wall clock says.
    #[test]
    fn the_phases_add_up_to_the_life_however_it_is_cut(steps in steps()) {
        let mut now = START;
        let mut account = begin(Phase::Running);
        let (mut phase, mut book) = (Phase::Running, Amounts::default());
        let (mut running, mut other, mut had) = (0, 0, 0);
        for step in steps {
            match step {
                Step::Pass(ms) => {
                    now.up += ms;
                    now.wall += ms;
                    match phase {
                        Phase::Running => running += ms,
                        Phase::Other => other += ms,
                        _ => {}
                    }
                    had += ms / 2;
                    account.advance(now);
                    account.work("p", had, None);
                }
                Step::Turn(next) => {
                    account.turn(next, now);
                    phase = next;
                }
                Step::Set(by) => now.wall = now.wall.saturating_add_signed(by),
                Step::Write => book.add(&sum(&account.take())),
                Step::Lost => {
                    let owed = account.take();
                    account.owe_again(owed);
                }
                Step::Restart => {
                    account.advance(now);
                    book.add(&sum(&account.take()));
                    let mark = serde_json::to_string(account.mark()).expect("written");
                    let mark = serde_json::from_str(&mark).expect("read");
                    account = Account::resume((2, 256), mark, phase, "this", now);
                }
            }
        }
        account.advance(now);
        book.add(&sum(&account.take()));
        prop_assert_eq!(book.life_ms(), now.up - START.up);
        prop_assert_eq!((book.running_ms, book.other_ms, book.cpu_ms), (running, other, had));
        prop_assert_eq!(book.vcpu_ms, 2 * running);
    }
}
