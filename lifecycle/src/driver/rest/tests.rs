//! Who is woken when, and by whose leave. By a clock that the tests move; never with a guest.

use super::*;
use crate::cold::ColdBoot;
use crate::terms::{Can, DefaultTerms, WantedTerms};

/// Promise 31.
#[tokio::test(start_paused = true)]
async fn a_byte_that_passes_after_it_was_found_idle_keeps_it_awake_unless_it_is_asked_to_sleep() {
    let (after, second) = (Duration::from_secs(15), Duration::from_secs(1));
    let defaults = DefaultTerms {
        on_idle: OnIdle::Standby,
        idle_after: after,
        ttl: None,
        max_life: None,
        longest_life: None,
        cold_boot: ColdBoot::default(),
    };
    let terms = Terms::agree(
        &WantedTerms::default(),
        &defaults,
        Can { sleep: true, boot: true, store: true },
    );
    let mut rest = Rest::new(terms, "acme".parse().unwrap(), Turns::new(1), fetches());
    let last = Instant::now() + second;
    tokio::time::advance(after + second).await;
    assert!(matches!(rest.look(last, None), Due::Sleep), "control: it is idle");
    assert!(!rest.is_disturbed(Some(last)) && !rest.is_disturbed(None));
    tokio::time::advance(second).await;
    let came = Some(Instant::now());
    assert!(rest.is_disturbed(came));
    rest.sleep(oneshot::channel().0);
    assert!(!rest.is_disturbed(came), "who asks for its sleep means it");
}

fn fetches() -> Fetches {
    Fetches::new(std::path::Path::new("/"), 0)
}

fn rest() -> Rest {
    Rest::new(Terms::none(), "acme".parse().unwrap(), Turns::new(1), fetches())
}

fn alarm(rest: &mut Rest, left: Duration) {
    rest.alarm = Some((Instant::now() + left, SystemTime::UNIX_EPOCH));
}

/// How long it is until it is woken by itself.
async fn woken(rest: &mut Rest) -> u64 {
    let began = Instant::now();
    rest.wake_due(false).await;
    began.elapsed().as_secs()
}

/// Promise 64.
#[tokio::test(start_paused = true)]
async fn an_alarm_takes_nothing_of_the_budget_of_bytes_and_is_said_to_be_why() {
    let mut rest = rest();
    for _ in 0..50 {
        alarm(&mut rest, Duration::from_secs(7));
        rest.glance(false);
        assert_eq!(locked(&rest.shown).wakes_because, Some("it was asked for"));
        assert_eq!(woken(&mut rest).await, 7);
        rest.runs(true);
        rest.alarm = None;
    }
    for _ in 0..10 {
        rest.want(Wanted::Data);
        assert_eq!(woken(&mut rest).await, 0, "it has all of it");
        rest.runs(true);
    }
    rest.want(Wanted::Data);
    assert!(tokio::time::timeout(Duration::from_secs(1), rest.wake_due(false)).await.is_err());
    rest.glance(false);
    let shown = locked(&rest.shown).clone();
    assert_eq!(shown.wakes_because, Some("bytes came for it"));
    let left = shown.wakes_at.expect("it is known when") - Instant::now();
    alarm(&mut rest, left / 2);
    assert_eq!(woken(&mut rest).await, left.as_secs() / 2, "whichever comes first");
    rest.runs(true);
}

/// Promise 75. Nor does it wait behind bytes that wait for the budget.
#[tokio::test(start_paused = true)]
async fn what_a_caller_says_on_its_stream_takes_nothing_of_the_budget_of_bytes() {
    let mut rest = rest();
    for _ in 0..50 {
        rest.want(Wanted::Caller);
        assert_eq!(woken(&mut rest).await, 0);
        rest.runs(true);
    }
    for _ in 0..10 {
        rest.want(Wanted::Data);
        assert_eq!(woken(&mut rest).await, 0, "it has all of it");
        rest.runs(true);
    }
    rest.want(Wanted::Data);
    let second = Duration::from_secs(1);
    assert!(tokio::time::timeout(second, rest.wake_due(false)).await.is_err(), "control");
    rest.want(Wanted::Caller);
    rest.want(Wanted::Data);
    assert_eq!((woken(&mut rest).await, rest.heeds()), (0, Some(Wanted::Data)));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_woken_is_tried_less_and_less_often_until_it_has_failed() {
    let mut rest = rest();
    alarm(&mut rest, Duration::from_secs(3));
    let mut pauses = Vec::new();
    for _ in 0..9 {
        pauses.push(woken(&mut rest).await);
        rest.sleeps(true);
    }
    assert_eq!(pauses, [3, 10, 20, 40, 80, 160, 320, 600, 600]);
    rest.answer(State::Failed, None);
    rest.glance(false);
    assert_eq!(locked(&rest.shown).wakes_at, None);
    let never = Duration::from_secs(86_400);
    assert!(tokio::time::timeout(never, rest.wake_due(false)).await.is_err());
}

/// Promise 77. And who comes back takes its turn of waking when it is here.
#[tokio::test(start_paused = true)]
async fn who_is_got_back_from_the_store_keeps_no_turn_of_waking_from_others() {
    let (turns, fetches, second) = (Turns::new(1), fetches(), Duration::from_secs(1));
    let sandbox = |tenant: &str| {
        Rest::new(Terms::none(), tenant.parse().unwrap(), turns.clone(), fetches.clone())
    };
    let (mut stored, mut other, mut asleep) = (sandbox("a"), sandbox("b"), sandbox("c"));
    for one in [&mut stored, &mut other, &mut asleep] {
        one.want(Wanted::Caller);
    }
    stored.wake_due(true).await;
    tokio::time::timeout(second, asleep.wake_due(false)).await.expect("it has the turn");
    tokio::time::timeout(second, other.wake_due(true)).await.expect("two are got back at once");
    let mut third = sandbox("d");
    third.want(Wanted::Caller);
    assert!(tokio::time::timeout(second, third.wake_due(true)).await.is_err(), "and no more");
    stored.fetched();
    assert!(stored.is_in_line());
    tokio::time::timeout(second, third.wake_due(true)).await.expect("its turn");
    assert!(tokio::time::timeout(second, stored.turn_comes()).await.is_err(), "one is woken");
    asleep.runs(true);
    tokio::time::timeout(second, stored.turn_comes()).await.expect("its turn");
    assert!(!stored.is_in_line());
}

/// Promise 64. Whoever waits for the store hears it, and one that is to be woken is not put there.
#[tokio::test(start_paused = true)]
async fn an_alarm_and_an_end_come_while_it_is_put_into_the_store_and_keep_it_from_that() {
    let mut rest = rest();
    let never = Duration::from_secs(86_400);
    assert!(tokio::time::timeout(never, rest.due()).await.is_err(), "control: nothing is due");
    assert!(tokio::time::timeout(never, rest.ends()).await.is_err());
    alarm(&mut rest, Duration::from_secs(7));
    let began = Instant::now();
    rest.store_at = Some(began);
    assert_eq!(rest.glance(true), Due::Suspend, "control: it is not to be woken yet");
    rest.due().await;
    assert_eq!((began.elapsed().as_secs(), rest.glance(true)), (7, Due::Nothing));
    // It could not be woken, and is to be all the same.
    rest.sleeps(true);
    assert_eq!(rest.glance(true), Due::Nothing);
    rest.due().await;
    assert_eq!((began.elapsed().as_secs(), rest.glance(true)), (17, Due::Nothing));
    rest.end = Some(Instant::now() + Duration::from_secs(3));
    rest.ends().await;
    assert_eq!(began.elapsed().as_secs(), 20);
    assert_eq!(rest.glance(true), Due::Remove("its time is over"));
}

#[tokio::test]
async fn who_gave_up_waiting_is_not_kept_until_it_arrives() {
    let mut rest = rest();
    let instead = || Error::Stopping;
    let (first, mut told) = oneshot::channel();
    rest.wake(first, instead);
    for _ in 0..1000 {
        rest.wake(oneshot::channel().0, instead);
        rest.sleep(oneshot::channel().0);
        rest.suspend(oneshot::channel().0);
    }
    let kept = (rest.wakers.len(), rest.sleepers.len(), rest.suspenders.len());
    assert!(kept <= (2, 2, 2), "{kept:?}");
    rest.answer(State::Running, None);
    assert!(matches!(told.try_recv(), Ok(Ok(()))), "control: who waits is told");
}
