//! A guest that slept while its daemon died: what the next one knows of its connections, and what it hears
//! of them when it wakes.

use egress::Remains;
use policy::audit::{Kind, Outcome};
use tokio::io::AsyncWriteExt;

use crate::asleep::{RULES, connected, is_reset, lie_down, passes};
use crate::peers::soon;
use crate::place::{ORIGIN, run};

/// Promise 41.
#[test]
fn a_guest_that_wakes_after_its_daemon_died_is_told_by_the_next_one() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, _far) = connected(&place, &origin).await;
        // Neither let through nor refused: the audit has nothing of it.
        let mut silent = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        place.has_open(2).await;
        lie_down(&place).await;
        let remains = place.router.remains(place.slot).expect("known");
        // In one process the far side is not closed by that.
        let place = place.restart().await;
        assert_eq!(remains.len(), 2);
        // Through a journal.
        let written = serde_json::to_string(&remains).expect("JSON");
        let mut read: Vec<Remains> = serde_json::from_str(&written).expect("the same");
        assert_eq!(read, remains);
        let subject = place.subject();
        let closed: Vec<_> = read.iter_mut().filter_map(|one| one.ended(&subject)).collect();
        let [closed] = closed.as_slice() else { panic!("{closed:?}") };
        assert_eq!((closed.outcome, closed.kind), (Outcome::Closed, Kind::Connection));
        assert_eq!(closed.destination, Some((ORIGIN, 2525).into()));
        assert!(remains.iter().any(|one| one.is_untold() && Some(one.flow) == closed.flow));
        assert!(read.iter_mut().all(|one| one.ended(&subject).is_none()), "once");
        place.router.bury(place.slot, read).expect("taken");
        place.in_guest(&["nft", "delete table ip stopped"]);
        place.router.rebuild(place.slot).await.expect("put back");
        assert!(is_reset(&mut guest).await, "it has said nothing, and is told");
        assert!(is_reset(&mut silent).await, "and of every one");
        let (mut guest, mut far) = connected(&place, &origin).await;
        passes(&mut guest, &mut far).await;
    });
}

/// What a guest has yet to hear is known to the next daemon, and that its end has been recorded.
#[test]
fn what_ends_at_night_is_told_to_the_audit_once_and_remembered_for_the_guest() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, _far) = connected(&place, &origin).await;
        lie_down(&place).await;
        let remains = place.router.remains(place.slot).expect("known");
        assert!(remains.iter().all(Remains::is_untold), "control: {remains:?}");
        assert_eq!(place.router.ended(place.slot), 0);
        place.write("", 2);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(place.router.ended(place.slot), 1);
        let remains = place.router.remains(place.slot).expect("known");
        assert_eq!(remains.iter().map(Remains::is_untold).collect::<Vec<_>>(), [false]);
        let place = place.restart().await;
        place.router.bury(place.slot, remains).expect("taken");
        place.in_guest(&["nft", "delete table ip stopped"]);
        place.router.rebuild(place.slot).await.expect("put back");
        assert!(is_reset(&mut guest).await);
    });
}

#[test]
fn a_guest_that_wakes_after_its_daemon_died_is_reset_at_its_first_word_at_the_latest() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, _far) = connected(&place, &origin).await;
        lie_down(&place).await;
        let place = place.restart().await;
        place.in_guest(&["nft", "delete table ip stopped"]);
        guest.write_all(b"anybody?").await.expect("sent");
        assert!(is_reset(&mut guest).await);
    });
}
