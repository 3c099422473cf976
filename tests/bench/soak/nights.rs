//! Sandboxes that fall asleep and wake all the time beside those that misbehave: a real guest with one
//! connection through all its nights, and many without a guest. All are awake again at the end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::asleep::Sleeper;
use crate::stage::Stage;

/// Sandboxes without a guest, and how many of them turn at once.
const MANY: usize = 40;
const AT_ONCE: usize = 4;
/// How many nights the real guest has at most, however long the soak is.
const NIGHTS: u32 = 100;

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Nights {
    pub(crate) of_guest: u32,
    pub(crate) of_many: u32,
    pub(crate) problems: Vec<String>,
}

/// Makes the sandboxes; the connection to the real guest.
pub(crate) fn prepare(stage: &Stage) -> UnixStream {
    for n in 0..MANY {
        assert_eq!(stage.create(&name(n), "").status, 201);
    }
    Sleeper::start(stage)
}

/// Until it is told to stop.
pub(crate) fn pass(
    stage: &Stage,
    line: &mut UnixStream,
    span: Duration,
    stop: &AtomicBool,
) -> Nights {
    let (guest, many) = std::thread::scope(|scope| {
        let guest = scope.spawn(|| nights_of_guest(stage, line, span / NIGHTS, stop));
        let each: Vec<_> = (0..AT_ONCE)
            .map(|first| scope.spawn(move || nights_of_many(stage, first, stop)))
            .collect();
        let many: Vec<_> = each.into_iter().map(|one| one.join().expect("no panic")).collect();
        (guest.join().expect("no panic"), many)
    });
    let mut all = Nights { of_guest: guest.0, problems: guest.1, ..Nights::default() };
    for (nights, problems) in many {
        all.of_many += nights;
        all.problems.extend(problems);
    }
    all
}

/// Each night ends with a number on the connection that was open all the while.
fn nights_of_guest(
    stage: &Stage,
    line: &mut UnixStream,
    pace: Duration,
    stop: &AtomicBool,
) -> (u32, Vec<String>) {
    let (mut nights, mut due) = (0, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        if let Err(problem) = turn(stage, &stage.machine_name(), "standby") {
            return (nights, vec![problem]);
        }
        let said = format!("{nights:032}");
        let mut heard = vec![0; said.len()];
        let done = line.write_all(said.as_bytes()).and_then(|()| line.read_exact(&mut heard));
        if done.is_err() || heard != said.as_bytes() {
            let heard = String::from_utf8_lossy(&heard).into_owned();
            return (nights, vec![format!("night {nights} of the guest: {done:?}, {heard:?}")]);
        }
        nights += 1;
        due = (due + pace).max(Instant::now());
        while Instant::now() < due && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    (nights, Vec::new())
}

fn nights_of_many(stage: &Stage, first: usize, stop: &AtomicBool) -> (u32, Vec<String>) {
    let (mut nights, mut problems) = (0, Vec::new());
    for n in (first..MANY).step_by(AT_ONCE).cycle() {
        for verb in ["standby", "resume"] {
            problems.extend(turn(stage, &name(n), verb).err());
        }
        nights += 1;
        std::thread::sleep(Duration::from_millis(200));
        if stop.load(Ordering::Relaxed) || problems.len() > 20 {
            break;
        }
    }
    (nights, problems)
}

fn turn(stage: &Stage, name: &str, verb: &str) -> Result<(), String> {
    let path = format!("/v1/sandboxes/{name}/{verb}");
    let answer = stage.api("POST", &path, "application/json", "{}");
    if answer.status == 200 { Ok(()) } else { Err(format!("{verb} of {name}: {}", answer.json)) }
}

fn name(n: usize) -> String {
    format!("night-{n}")
}
